//! Readable text of an expression, close to WGSL. For messages and debugging: kernel text is `lower`'s.

use super::{Expr, Op, Type};

/// Longer texts are cut: an expression that shares parts can be exponentially longer as text.
const LIMIT: usize = 4000;

/// The text of `expr`, cut with … after a few thousand characters.
pub(crate) fn text(expr: &Expr) -> String {
    let mut out = String::new();
    print(expr, 0, &mut out);
    if out.len() >= LIMIT {
        out.push('…');
    }
    out
}

/// How tightly an operation binds; 0 for calls and names.
fn infix(op: &Op) -> Option<(&'static str, u8)> {
    Some(match op {
        Op::Or => ("|", 1),
        Op::Xor => ("^", 2),
        Op::And => ("&", 3),
        Op::Eq => ("==", 4),
        Op::Ne => ("!=", 4),
        Op::Lt => ("<", 5),
        Op::Le => ("<=", 5),
        Op::Gt => (">", 5),
        Op::Ge => (">=", 5),
        Op::Shl => ("<<", 6),
        Op::Shr => (">>", 6),
        Op::Add => ("+", 7),
        Op::Sub => ("-", 7),
        Op::Mul => ("*", 8),
        Op::Div => ("/", 8),
        Op::Rem => ("%", 8),
        _ => return None,
    })
}

fn print(expr: &Expr, outer: u8, out: &mut String) {
    if out.len() >= LIMIT {
        return;
    }
    let args = expr.args();
    if let (Some((sign, level)), [a, b]) = (infix(expr.op()), args) {
        if level < outer {
            out.push('(');
        }
        // WGSL wants parentheses where comparison, logic, shifts and arithmetic mix.
        let (left, right) = match level {
            7 | 8 => (level, level + 1),
            6 => (9, 9),
            4 | 5 => (7, 7),
            _ if infix(a.op()).is_some_and(|(s, _)| s == sign) => (level, 9),
            _ => (9, 9),
        };
        print(a, left, out);
        out.push_str(&format!(" {sign} "));
        print(b, right, out);
        if level < outer {
            out.push(')');
        }
        return;
    }
    let name = match expr.op() {
        Op::Const(value) => {
            out.push_str(&value.to_string());
            return;
        }
        Op::Input(input) => {
            out.push_str(input.name());
            return;
        }
        Op::Scalar(decl) => {
            out.push_str(&decl.name);
            return;
        }
        Op::Neg | Op::Not => {
            let sign = match (expr.op(), expr.ty()) {
                (Op::Neg, _) => '-',
                (_, Type::Bool) => '!',
                _ => '~',
            };
            out.push(sign);
            let operand = out.len();
            print(&args[0], 9, out);
            // WGSL reads `--` as one word, its decrement.
            if out[operand..].starts_with('-') {
                out.insert(operand, '(');
                out.push(')');
            }
            return;
        }
        Op::Gather(decl) => &*decl.name,
        Op::Select => {
            // WGSL's order: the value for false first.
            out.push_str("select(");
            arguments([&args[2], &args[1], &args[0]].into_iter(), out);
            return;
        }
        // WGSL has no overloads for functions of a text.
        Op::WrappingAdd if expr.ty() == Type::U32 => "wrapping_add_u32",
        Op::WrappingSub if expr.ty() == Type::U32 => "wrapping_sub_u32",
        Op::WrappingMul if expr.ty() == Type::U32 => "wrapping_mul_u32",
        op => op.name(),
    };
    out.push_str(name);
    out.push('(');
    arguments(args.iter(), out);
}

/// With parentheses around `a < b`: between commas, WGSL may take `<` and a later `>` for those of a type.
fn arguments<'a>(args: impl Iterator<Item = &'a Expr>, out: &mut String) {
    for (i, arg) in args.enumerate() {
        if i > 0 {
            out.push_str(", ");
        }
        print(arg, if *arg.op() == Op::Lt { 9 } else { 0 }, out);
    }
    out.push(')');
}
