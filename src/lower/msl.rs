//! How the Metal Shading Language spells expressions.
//!
//! Signed overflow is undefined in MSL (its compiler folds `a + 1 > a` to true), so signed arithmetic
//! goes through uint in small named functions.

use std::collections::BTreeSet;

use super::terms::Shape;
use super::wgsl::{ordered, plain_power};
use super::{ADD, AND, ATOM, COMPARE, Call, Home, MUL, OR, SHIFT, Target, Text, UNARY, XOR};
use crate::expr::{CaptureDecl, CaptureType, Input, Op, ScalarDecl, Type, Value};

pub(super) struct Msl;

impl Target for Msl {
    fn ty(&self, ty: Type) -> &'static str {
        match ty {
            Type::F32 => "float",
            Type::I32 => "int",
            Type::U32 => "uint",
            Type::Bool => "bool",
        }
    }

    fn constant(&self, value: Value) -> Text {
        let text = match value {
            Value::F32(x) if x.is_finite() => format!("{x:?}f"),
            // Known at run time only: fast math may fold an infinite constant to anything.
            Value::F32(x) => return Text::atom(format!("as_type<float>({:#x}u + ctx.p.zero)", x.to_bits())),
            Value::I32(i32::MIN) => return Text::atom("(-2147483647 - 1)"),
            Value::I32(x) => x.to_string(),
            Value::U32(x) => format!("{x}u"),
            Value::Bool(x) => x.to_string(),
        };
        let level = if text.starts_with('-') { UNARY } else { ATOM };
        Text { text, level }
    }

    fn input(&self, input: Input) -> Text {
        Text::atom(match input {
            Input::Score | Input::Batch | Input::Head | Input::Q | Input::Kv => input.name(),
            Input::QLen => "int(ctx.p.q_len)",
            Input::KvLen => "int(kv_len_of(ctx, uint(b)))",
        })
    }

    fn call(&self, call: &Call<'_>, functions: &mut BTreeSet<&'static str>) -> Text {
        let args = call.args;
        let infix = |sign, level| Text::infix(sign, level, &args[0], &args[1]);
        let function = |name| Text::call(name, args);
        let mut own = |name: &'static str| {
            functions.insert(name);
            Text::call(name, args)
        };
        let (float, int) = (call.of == Type::F32, call.of == Type::I32);
        match call.op {
            Op::Const(_) | Op::Input(_) | Op::Scalar(_) | Op::Gather(_) => unreachable!("not calls"),
            Op::Neg if float => Text::prefix("-", &args[0]),
            Op::Neg | Op::WrappingNeg => own("wrap_neg"),
            Op::Not => Text::prefix(if call.of == Type::Bool { "!" } else { "~" }, &args[0]),
            Op::Abs if float => function("fabs"),
            Op::Abs if int => own("wrap_abs"),
            Op::Abs => args[0].clone(),
            Op::Sign if float => function("sign"),
            Op::Sign => own("sign_of"),
            Op::Floor => function("floor"),
            Op::Ceil => function("ceil"),
            Op::Round => function("rint"),
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
            // Beyond 15 it is 1 in f32, and the fast version gives NaN for large arguments.
            Op::Tanh => Text::atom(format!("tanh(clamp({}, -15.0f, 15.0f))", args[0].text)),
            Op::Sigmoid => {
                let exp = Text::call("exp", &[Text::prefix("-", &args[0])]);
                Text { text: format!("1.0f / (1.0f + {})", exp.text), level: MUL }
            }
            Op::CountOneBits => function("popcount"),
            Op::Add | Op::WrappingAdd if int => own("wrap_add"),
            Op::Add | Op::WrappingAdd => infix("+", ADD),
            Op::Sub | Op::WrappingSub if int => own("wrap_sub"),
            Op::Sub | Op::WrappingSub => infix("-", ADD),
            Op::Mul | Op::WrappingMul if int => own("wrap_mul"),
            Op::Mul | Op::WrappingMul => infix("*", MUL),
            Op::Div if float => infix("/", MUL),
            Op::Div if int => own("divide_int"),
            Op::Div => own("divide_uint"),
            Op::Rem if int => own("remainder_int"),
            Op::Rem => own("remainder_uint"),
            Op::FloorDiv => own("floor_div"),
            Op::FloorMod => own("floor_mod"),
            Op::Min => function("min"),
            Op::Max => function("max"),
            Op::Pow if plain_power(call.constant(1)) => function("pow"),
            Op::Pow => own("power"),
            Op::And => infix("&", AND),
            Op::Or => infix("|", OR),
            Op::Xor if call.of == Type::Bool => infix("!=", COMPARE),
            Op::Xor => infix("^", XOR),
            Op::Shl if int => own("shift_left"),
            Op::Shl => Text::infix("<<", SHIFT, &args[0], &amount(call)),
            Op::Shr => Text::infix(">>", SHIFT, &args[0], &amount(call)),
            Op::Lt => infix("<", COMPARE),
            Op::Le => infix("<=", COMPARE),
            Op::Gt => infix(">", COMPARE),
            Op::Ge => infix(">=", COMPARE),
            Op::Eq => infix("==", COMPARE),
            Op::Ne => infix("!=", COMPARE),
            Op::Select => Text {
                text: format!("{} ? {} : {}", args[0].at(ATOM), args[1].at(ATOM), args[2].at(ATOM)),
                level: 0,
            },
            Op::Clamp if ordered(call.constant(1), call.constant(2)) => function("clamp"),
            Op::Clamp => {
                let low = Text::call("max", &args[..2]);
                Text::call("min", &[low, args[2].clone()])
            }
            Op::ToF32 => function("float"),
            Op::ToI32 if float => own("saturate_int"),
            Op::ToI32 => function("int"),
            Op::ToU32 if float => own("saturate_uint"),
            Op::ToU32 => function("uint"),
            Op::ToBool => function("bool"),
            Op::BitsToF32 => function("as_type<float>"),
            Op::BitsToI32 => function("as_type<int>"),
            Op::BitsToU32 => function("as_type<uint>"),
        }
    }

    fn define(&self, name: &str) -> &'static str {
        match name {
            "wrap_neg" => "inline int wrap_neg(int a) { return int(0u - uint(a)); }\n",
            "wrap_abs" => "inline int wrap_abs(int a) { return a < 0 ? int(0u - uint(a)) : a; }\n",
            "wrap_add" => "inline int wrap_add(int a, int b) { return int(uint(a) + uint(b)); }\n",
            "wrap_sub" => "inline int wrap_sub(int a, int b) { return int(uint(a) - uint(b)); }\n",
            "wrap_mul" => "inline int wrap_mul(int a, int b) { return int(uint(a) * uint(b)); }\n",
            "shift_left" => "inline int shift_left(int a, uint b) { return int(uint(a) << (b & 31u)); }\n",
            "sign_of" => "inline int sign_of(int a) { return int(a > 0) - int(a < 0); }\n",
            // x / 0 = x, x % 0 = 0, MIN / -1 = MIN, MIN % -1 = 0: dividing by 1 gives each of them.
            "divide_int" => {
                "inline int divide_int(int a, int b) {
  return a / ((b == 0 || (b == -1 && a == (-2147483647 - 1))) ? 1 : b);
}
"
            }
            "remainder_int" => {
                "inline int remainder_int(int a, int b) { return a % ((b == 0 || b == -1) ? 1 : b); }\n"
            }
            "divide_uint" => "inline uint divide_uint(uint a, uint b) { return a / (b == 0u ? 1u : b); }\n",
            "remainder_uint" => {
                "inline uint remainder_uint(uint a, uint b) { return a % (b == 0u ? 1u : b); }\n"
            }
            "floor_div" => {
                "inline int floor_div(int a, int b) {
  int by = (b == 0 || (b == -1 && a == (-2147483647 - 1))) ? 1 : b;
  int rest = a % by;
  return a / by - int(rest != 0 && (rest < 0) != (by < 0));
}
"
            }
            "floor_mod" => {
                "inline int floor_mod(int a, int b) {
  int by = (b == 0 || b == -1) ? 1 : b;
  int rest = a % by;
  return rest != 0 && (rest < 0) != (by < 0) ? rest + by : rest;
}
"
            }
            "saturate_int" => {
                "inline int saturate_int(float a) { return int(clamp(a, -2147483648.0f, 2147483520.0f)); }\n"
            }
            "saturate_uint" => {
                "inline uint saturate_uint(float a) { return uint(clamp(a, 0.0f, 4294967040.0f)); }\n"
            }
            // exp2(y * log2(x)), which `pow` may be, has no value below 0 and none to rely on at 0.
            "power" => {
                "inline float power(float x, float y) {
  float size = fabs(x);
  if (size == 0.0f || y == 0.0f) { return y == 0.0f ? 1.0f : (y < 0.0f ? 1.0f / (x * x) : 0.0f); }
  bool whole = floor(y) == y;
  bool odd = floor(0.5f * y) * 2.0f != y;
  float magnitude = pow(whole ? size : x, y);
  return whole && odd && x < 0.0f ? -magnitude : magnitude;
}
"
            }
            _ => unreachable!("call() names only these"),
        }
    }

    fn read(&self, capture: &str, index: &[Text]) -> Text {
        let mut args = vec![Text::atom("ctx")];
        args.extend_from_slice(index);
        Text::call(&format!("captured_{capture}"), &args)
    }

    fn scalar(&self, name: &str) -> Text {
        Text::atom(format!("scalar_{name}(ctx)"))
    }

    fn bind(&self, name: &str, ty: Type, value: &str) -> String {
        format!("  const {} {name} = {value};\n", self.ty(ty))
    }

    fn function(&self, name: &str, ty: Type, body: &str) -> String {
        let score = if ty == Type::F32 { "float score, " } else { "" };
        let ty = self.ty(ty);
        format!(
            "inline {ty} {name}(thread const Ctx& ctx, {score}Row row, int b, int h, int q, int kv) {{\n{body}}}\n"
        )
    }

    fn field(&self, i: usize, ty: Type) -> String {
        format!("{} r{i};", self.ty(ty))
    }

    fn row(&self, fields: &[String], body: &str) -> String {
        let fields = fields.join(" ");
        format!(
            "struct Row {{ {fields} }};\ninline Row row_mod(thread const Ctx& ctx, int b, int h, int q) {{\n{body}}}\n"
        )
    }

    fn row_value(&self, values: &[(Type, String)]) -> String {
        // `a & b` is an int, which braces do not narrow to bool.
        let cast = |(ty, value): &(Type, String)| match ty {
            Type::Bool => format!("bool({value})"),
            Type::F32 | Type::I32 | Type::U32 => value.clone(),
        };
        format!("Row{{{}}}", values.iter().map(cast).collect::<Vec<_>>().join(", "))
    }

    fn element(&self, capture: &str, number: usize, index: &[String]) -> String {
        let index: String = index.iter().map(|i| format!(", {i}")).collect();
        format!("ctx.p.info[{}].z + position_{capture}(ctx{index})", 2 * number + 1)
    }

    fn numbered(&self, name: &str, shape: Shape, bodies: &[String]) -> String {
        let (parameters, ty, none) = match shape {
            Shape::Derivative => ("float score, Row row, int b, int h, int q, int kv", "float", "0.0f"),
            Shape::Row => ("int b, int h, int q", "uint", "0u"),
            Shape::Column => ("int b, int h, int kv", "uint", "0u"),
            Shape::Pair => ("Row row, int b, int h, int q, int kv", "uint", "0u"),
        };
        let mut text = format!("inline {ty} {name}(thread const Ctx& ctx, uint term, {parameters}) {{\n");
        for (i, body) in bodies.iter().enumerate() {
            text += &format!("  if (term == {i}u) {{\n{body}  }}\n");
        }
        text + &format!("  return {none};\n}}\n")
    }

    fn count(&self, name: &str, count: usize) -> String {
        format!("#define {name} {count}u\n")
    }

    fn accessor(&self, decl: &CaptureDecl, position: usize, home: Home) -> String {
        let name = &decl.name;
        let rank = usize::from(decl.rank);
        let parameters: String = (0..rank).map(|i| format!(", int i{i}")).collect();
        let names: String = (0..rank).map(|i| format!(", i{i}")).collect();
        let (dims, offset) = (2 * position, 2 * position + 1);
        let mut at = String::new();
        for (i, axis) in ["x", "y", "z", "w"].into_iter().take(rank).enumerate() {
            let clamped = format!("uint(clamp(i{i}, 0, int(ctx.p.info[{dims}].{axis}) - 1))");
            at = if i == 0 { clamped } else { format!("({at}) * ctx.p.info[{dims}].{axis} + {clamped}") };
        }
        if rank == 0 {
            at = "0u".into();
        }
        let buffer = match home {
            Home::Captures => "ctx.captures",
            Home::Large => "ctx.large",
            Home::Tables => "ctx.tables",
        };
        let word = |at: &str| format!("{buffer}[ctx.p.info[{offset}].x + {at}]");
        let value = match decl.dtype {
            CaptureType::F32 => format!("as_type<float>({})", word("at")),
            CaptureType::I32 => format!("as_type<int>({})", word("at")),
            CaptureType::U32 => word("at"),
            CaptureType::F16 => {
                format!("float(as_type<half>(ushort({} >> (16u * (at & 1u)))))", word("at / 2u"))
            }
            CaptureType::BF16 => {
                format!("as_type<float>(({} >> (16u * (at & 1u))) << 16u)", word("at / 2u"))
            }
            CaptureType::Bool => format!("(({} >> (8u * (at & 3u))) & 255u) != 0u", word("at / 4u")),
        };
        format!(
            "inline uint position_{name}(thread const Ctx& ctx{parameters}) {{ return {at}; }}
inline {ty} captured_{name}(thread const Ctx& ctx{parameters}) {{
  uint at = ctx.p.info[{offset}].y + position_{name}(ctx{names});
  return {value};
}}
",
            ty = self.ty(decl.dtype.ty()),
        )
    }

    fn scalar_accessor(&self, decl: &ScalarDecl, word: usize) -> String {
        let value = format!("ctx.p.info[{}].{}", word / 4, ["x", "y", "z", "w"][word % 4]);
        let ty = self.ty(decl.ty);
        let value = if decl.ty == Type::U32 { value } else { format!("as_type<{ty}>({value})") };
        format!("inline {ty} scalar_{}(thread const Ctx& ctx) {{ return {value}; }}\n", decl.name)
    }
}

/// The amount of a shift, below 32.
fn amount(call: &Call<'_>) -> Text {
    match call.constant(1) {
        Some(Value::U32(x)) => Text::atom(format!("{}u", x % 32)),
        _ => Text::infix("&", AND, &call.args[1], &Text::atom("31u")),
    }
}
