//! How WGSL spells expressions. The text suits naga and Tint alike.

use std::collections::BTreeSet;

use super::terms::Shape;
use super::{ADD, AND, ATOM, COMPARE, Call, Home, MUL, OR, SHIFT, Target, Text, UNARY, XOR};
use crate::expr::{CaptureDecl, CaptureType, Input, Op, ScalarDecl, Type, Value};

pub(super) struct Wgsl;

impl Target for Wgsl {
    fn ty(&self, ty: Type) -> &'static str {
        match ty {
            Type::F32 => "f32",
            Type::I32 => "i32",
            Type::U32 => "u32",
            Type::Bool => "bool",
        }
    }

    fn constant(&self, value: Value) -> Text {
        match value {
            Value::F32(x) if x.is_finite() => {
                // Shortest text that reads back as x, but never beyond the largest f32.
                let text = if x.abs() > 3.4e38 { format!("{:e}", f64::from(x)) } else { format!("{x:?}") };
                literal(text)
            }
            // WGSL refuses infinities and NaN in constants, so one operand is known at run time only.
            Value::F32(x) => Text::atom(format!("bitcast<f32>({:#x}u + p.zero)", x.to_bits())),
            Value::I32(i32::MIN) => Text::atom("i32(-2147483648)"),
            Value::I32(x) => literal(x.to_string()),
            Value::U32(x) => Text::atom(format!("{x}u")),
            Value::Bool(x) => Text::atom(x.to_string()),
        }
    }

    fn input(&self, input: Input) -> Text {
        Text::atom(match input {
            Input::Score | Input::Batch | Input::Head | Input::Q | Input::Kv => input.name(),
            Input::QLen => "i32(p.q_len)",
            Input::KvLen => "i32(kv_len_of(u32(b)))",
        })
    }

    fn call(&self, call: &Call<'_>, functions: &mut BTreeSet<&'static str>) -> Text {
        let args = call.args;
        let infix = |sign, level| Text::infix(sign, level, &args[0], &args[1]);
        let function = |name| Text::call(name, args);
        let zero =
            matches!(call.exprs.get(1).and_then(|e| e.as_constant()), Some(Value::I32(0) | Value::U32(0)));
        match call.op {
            Op::Const(_) | Op::Input(_) | Op::Scalar(_) | Op::Gather(_) => unreachable!("not calls"),
            Op::Neg | Op::WrappingNeg => Text::prefix("-", &args[0]),
            Op::Not => Text::prefix(if call.of == Type::Bool { "!" } else { "~" }, &args[0]),
            Op::Abs => function("abs"),
            Op::Sign => function("sign"),
            Op::Floor => function("floor"),
            Op::Ceil => function("ceil"),
            Op::Round => function("round"),
            Op::Trunc => function("trunc"),
            Op::Fract => function("fract"),
            Op::Sqrt => function("sqrt"),
            Op::Exp => function("exp"),
            Op::Exp2 => function("exp2"),
            Op::Log => function("log"),
            Op::Log2 => function("log2"),
            Op::Sin => function("sin"),
            Op::Cos => function("cos"),
            Op::Tan => function("tan"),
            // Beyond 15 it is 1 in f32, and implementations by exp() give NaN for large arguments.
            Op::Tanh => Text::atom(format!("tanh(clamp({}, -15.0, 15.0))", args[0].text)),
            Op::Sigmoid => {
                let exp = Text::call("exp", &[Text::prefix("-", &args[0])]);
                Text { text: format!("1.0 / (1.0 + {})", exp.text), level: MUL }
            }
            Op::CountOneBits => function("countOneBits"),
            Op::Add | Op::WrappingAdd => infix("+", ADD),
            Op::Sub | Op::WrappingSub => infix("-", ADD),
            Op::Mul | Op::WrappingMul => infix("*", MUL),
            // A constant 0 as divisor is an error in WGSL; its value is x / 0 = x, x % 0 = 0.
            Op::Div | Op::FloorDiv if zero => args[0].clone(),
            Op::Rem | Op::FloorMod if zero => self.constant(Value::zero(call.of)),
            Op::Div => infix("/", MUL),
            Op::Rem => infix("%", MUL),
            Op::FloorDiv => {
                functions.insert("floor_div");
                function("floor_div")
            }
            Op::FloorMod => {
                functions.insert("floor_mod");
                function("floor_mod")
            }
            Op::Min => function("min"),
            Op::Max => function("max"),
            Op::Pow if plain_power(call.constant(1)) => function("pow"),
            Op::Pow => {
                functions.insert("power");
                function("power")
            }
            Op::And => infix("&", AND),
            Op::Or => infix("|", OR),
            Op::Xor if call.of == Type::Bool => infix("!=", COMPARE),
            Op::Xor => infix("^", XOR),
            Op::Shl => Text::infix("<<", SHIFT, &args[0], &amount(call)),
            Op::Shr => Text::infix(">>", SHIFT, &args[0], &amount(call)),
            Op::Lt => infix("<", COMPARE),
            Op::Le => infix("<=", COMPARE),
            Op::Gt => infix(">", COMPARE),
            Op::Ge => infix(">=", COMPARE),
            Op::Eq => infix("==", COMPARE),
            Op::Ne => infix("!=", COMPARE),
            Op::Select => Text::call("select", &[args[2].clone(), args[1].clone(), args[0].clone()]),
            Op::Clamp if ordered(call.constant(1), call.constant(2)) => function("clamp"),
            Op::Clamp => {
                let low = Text::call("max", &args[..2]);
                Text::call("min", &[low, args[2].clone()])
            }
            Op::ToF32 => function("f32"),
            Op::ToI32 => function("i32"),
            Op::ToU32 => function("u32"),
            Op::ToBool => function("bool"),
            Op::BitsToF32 => function("bitcast<f32>"),
            Op::BitsToI32 => function("bitcast<i32>"),
            Op::BitsToU32 => function("bitcast<u32>"),
        }
    }

    fn define(&self, name: &str) -> &'static str {
        match name {
            // WGSL's own division by 0 gives x / 0 = x and x % 0 = 0, so the rest is 0 then.
            "floor_div" => {
                "fn floor_div(a: i32, b: i32) -> i32 {
  let quotient = a / b;
  let rest = a % b;
  return select(quotient, quotient - 1, (rest != 0) & ((rest < 0) != (b < 0)));
}
"
            }
            "floor_mod" => {
                "fn floor_mod(a: i32, b: i32) -> i32 {
  let rest = a % b;
  return select(rest, rest + b, (rest != 0) & ((rest < 0) != (b < 0)));
}
"
            }
            // exp2(y * log2(x)), which `pow` may be, has no value below 0 and none to rely on at 0;
            // drivers drop the sign of zero, and abs() where they think it idle.
            "power" => {
                "fn power(x: f32, y: f32) -> f32 {
  let size = abs(x);
  if size == 0.0 || y == 0.0 {
    return select(select(0.0, 1.0, y == 0.0), 1.0 / (x * x), y < 0.0);
  }
  let whole = floor(y) == y;
  let odd = floor(0.5 * y) * 2.0 != y;
  let magnitude = pow(select(x, size, whole), y);
  return select(magnitude, -magnitude, x < 0.0 && whole && odd);
}
"
            }
            _ => unreachable!("call() names only these"),
        }
    }

    fn read(&self, capture: &str, index: &[Text]) -> Text {
        Text::call(&format!("captured_{capture}"), index)
    }

    fn scalar(&self, name: &str) -> Text {
        Text::atom(format!("scalar_{name}()"))
    }

    fn bind(&self, name: &str, _: Type, value: &str) -> String {
        format!("  let {name} = {value};\n")
    }

    fn function(&self, name: &str, ty: Type, body: &str) -> String {
        let score = if ty == Type::F32 { "score: f32, " } else { "" };
        let ty = self.ty(ty);
        format!("fn {name}({score}row: Row, b: i32, h: i32, q: i32, kv: i32) -> {ty} {{\n{body}}}\n")
    }

    fn field(&self, i: usize, ty: Type) -> String {
        format!("r{i}: {}", self.ty(ty))
    }

    fn row(&self, fields: &[String], body: &str) -> String {
        let fields = fields.join(", ");
        format!("struct Row {{ {fields} }}\nfn row_mod(b: i32, h: i32, q: i32) -> Row {{\n{body}}}\n")
    }

    fn row_value(&self, values: &[(Type, String)]) -> String {
        format!("Row({})", values.iter().map(|(_, value)| &**value).collect::<Vec<_>>().join(", "))
    }

    fn element(&self, capture: &str, number: usize, index: &[String]) -> String {
        format!("p.info[{}].z + position_{capture}({})", 2 * number + 1, index.join(", "))
    }

    fn numbered(&self, name: &str, shape: Shape, bodies: &[String]) -> String {
        let (parameters, ty, none) = match shape {
            Shape::Derivative => ("score: f32, row: Row, b: i32, h: i32, q: i32, kv: i32", "f32", "0.0"),
            Shape::Row => ("b: i32, h: i32, q: i32", "u32", "0u"),
            Shape::Column => ("b: i32, h: i32, kv: i32", "u32", "0u"),
            Shape::Pair => ("row: Row, b: i32, h: i32, q: i32, kv: i32", "u32", "0u"),
        };
        let mut text = format!("fn {name}(term: u32, {parameters}) -> {ty} {{\n");
        for (i, body) in bodies.iter().enumerate() {
            text += &format!("  if (term == {i}u) {{\n{body}  }}\n");
        }
        text + &format!("  return {none};\n}}\n")
    }

    fn count(&self, name: &str, count: usize) -> String {
        format!("const {name}: u32 = {count}u;\n")
    }

    fn accessor(&self, decl: &CaptureDecl, position: usize, home: Home) -> String {
        let name = &decl.name;
        let rank = usize::from(decl.rank);
        let parameters: Vec<String> = (0..rank).map(|i| format!("i{i}: i32")).collect();
        let names: Vec<String> = (0..rank).map(|i| format!("i{i}")).collect();
        let (dims, offset) = (2 * position, 2 * position + 1);
        let mut at = String::new();
        for (i, axis) in ["x", "y", "z", "w"].into_iter().take(rank).enumerate() {
            let clamped = format!("u32(clamp(i{i}, 0, i32(p.info[{dims}].{axis}) - 1))");
            at = if i == 0 { clamped } else { format!("({at}) * p.info[{dims}].{axis} + {clamped}") };
        }
        if rank == 0 {
            at = "0u".into();
        }
        let buffer = match home {
            Home::Captures => "captures",
            Home::Large => "large",
            Home::Tables => "tables",
        };
        let word = |at: &str| format!("{buffer}[p.info[{offset}].x + {at}]");
        let (lines, value) = match decl.dtype {
            CaptureType::F32 => (String::new(), format!("bitcast<f32>({})", word("at"))),
            CaptureType::I32 => (String::new(), format!("bitcast<i32>({})", word("at"))),
            CaptureType::U32 => (String::new(), word("at")),
            CaptureType::F16 => (
                format!("  let pair = unpack2x16float({});\n", word("at / 2u")),
                "select(pair.x, pair.y, (at & 1u) == 1u)".into(),
            ),
            CaptureType::BF16 => (
                format!("  let word = {};\n", word("at / 2u")),
                "bitcast<f32>((word >> (16u * (at & 1u))) << 16u)".into(),
            ),
            CaptureType::Bool => (
                format!("  let word = {};\n", word("at / 4u")),
                "((word >> (8u * (at & 3u))) & 255u) != 0u".into(),
            ),
        };
        format!(
            "fn position_{name}({parameters}) -> u32 {{ return {at}; }}
fn captured_{name}({parameters}) -> {ty} {{
  let at = p.info[{offset}].y + position_{name}({names});
{lines}  return {value};
}}
",
            parameters = parameters.join(", "),
            names = names.join(", "),
            ty = self.ty(decl.dtype.ty()),
        )
    }

    fn scalar_accessor(&self, decl: &ScalarDecl, word: usize) -> String {
        let value = format!("p.info[{}].{}", word / 4, ["x", "y", "z", "w"][word % 4]);
        let ty = self.ty(decl.ty);
        let value = if decl.ty == Type::U32 { value } else { format!("bitcast<{ty}>({value})") };
        format!("fn scalar_{}() -> {ty} {{ return {value}; }}\n", decl.name)
    }
}

fn literal(text: String) -> Text {
    let level = if text.starts_with('-') { UNARY } else { ATOM };
    Text { text, level }
}

/// The amount of a shift, below 32.
fn amount(call: &Call<'_>) -> Text {
    match call.constant(1) {
        Some(Value::U32(x)) => Text::atom(format!("{}u", x % 32)),
        _ => Text::infix("&", AND, &call.args[1], &Text::atom("31u")),
    }
}

/// Whether `pow` itself says what a power is: at 0 it is 0, and below 0 NaN.
pub(super) fn plain_power(exponent: Option<Value>) -> bool {
    matches!(exponent, Some(Value::F32(y)) if y > 0.0 && y.fract() != 0.0)
}

/// Whether both are constants and in order: only then is clamp() the same in every implementation.
pub(super) fn ordered(low: Option<Value>, high: Option<Value>) -> bool {
    match (low, high) {
        (Some(Value::F32(low)), Some(Value::F32(high))) => low <= high,
        (Some(Value::I32(low)), Some(Value::I32(high))) => low <= high,
        (Some(Value::U32(low)), Some(Value::U32(high))) => low <= high,
        _ => false,
    }
}
