// Elements of dout, and of gradients that are added to, where every offset and stride is a multiple of
// four elements, in any format.

fn load_dout(at: u32, left: u32) -> Quad { return dout[at / 4u]; }
fn load_out(at: u32, left: u32) -> Quad { return out[at / 4u]; }
