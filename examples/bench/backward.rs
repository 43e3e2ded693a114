//! The suite `backward`: all gradients of q, k and v beside the forward pass, and the memory of a long call.

use crate::baseline::wait;
use crate::measure::{Fused, Sizes, Work, medians};
use crate::suites::{Tile, at_most, checked_baseline};
use crate::{Failure, Found, Row};
use flexattn::{Attention, DType, Gpu, Runtime, Saved, Tensor, Wanted, masks};

pub(crate) fn run(gpu: &Gpu, rounds: Option<usize>) -> Result<Found, Failure> {
    let sizes = Sizes::square(2, 4096, 64);
    let data = sizes.data();
    let fused = Fused::new(gpu, sizes, DType::F32, &data)?;
    let baseline = checked_baseline(gpu, &fused, sizes, (Tile::Eight, false), &data)?;
    // 64 of every 2048 keys or so: 3 % of the pairs.
    let window = || Attention::new().mask_mod(masks::sliding_window(126));
    let (dense, sparse) = (Attention::new(), window());
    let mut works: Vec<Work<'_>> = vec![
        fused.work(dense.clone()),
        gradients(gpu, &fused, dense)?,
        fused.work(sparse.clone()),
        gradients(gpu, &fused, sparse)?,
    ];
    works.extend(baseline.iter().map(|baseline| Box::new(|| baseline.run()) as Work<'_>));
    let times = medians("backward", rounds.unwrap_or(3), &mut works)?;
    drop(works);

    let density = sizes.density(Some(&masks::sliding_window(126)))?;
    let row = |case, density| sizes.row("backward", case, gpu, DType::F32, density);
    let mut found = Found::default();
    let base = times.get(4).copied();
    found.rows.push(row("forward, no mask", 1.0).timed(times[0], base));
    found.rows.push(row("backward, no mask", 1.0).backward(times[1]));
    found.rows.push(row("forward, window 126", density).timed(times[2], base));
    found.rows.push(row("backward, window 126", density).backward(times[3]));
    found.checks.push(at_most("backward / forward, no mask", gpu, times[1] / times[0], 4.0));
    found.checks.push(at_most("backward, window 126 / no mask", gpu, times[3] / times[1], 0.10));
    let (row, mib) = memory(gpu)?;
    found.rows.push(row);
    found.checks.push(at_most("MiB of a 16384 x 16384 call with gradients", gpu, mib, 40.0));
    Ok(found)
}

impl Row {
    /// A backward pass does 2.5 times the multiplications of the forward one: five products, not two.
    fn backward(self, ms: f64) -> Row {
        let row = self.timed(ms, None);
        Row { gflops: row.gflops.map(|gflops| 2.5 * gflops), ..row }
    }
}

/// The gradients of q, k and v for a dout like v, waited for.
fn gradients<'a>(gpu: &'a Gpu, fused: &'a Fused<'a>, attention: Attention) -> Result<Work<'a>, Failure> {
    let [q, k, v] = fused.inputs();
    let output = attention.forward(gpu, q, k, v)?;
    let saved = Saved::new(q, k, v, &output)?;
    Ok(Box::new(move || {
        attention.backward(gpu, &saved, v, None, &Wanted::qkv())?;
        match gpu.device() {
            Some(device) => wait(device),
            None => Ok(()),
        }
    }))
}

/// Device memory of a long call and its gradients: tensors, statistics, lists and scratch. Everything is
/// allocated and nothing is run.
fn memory(gpu: &Gpu) -> Result<(Row, f64), Failure> {
    let sizes = Sizes::square(1, 16384, 64);
    let fresh = Gpu::builder().tier(gpu.tier()).build()?;
    let shape = [1, 1, sizes.q_len, sizes.head_dim];
    let zeros = || fresh.zeros(DType::F32, shape);
    let (q, k, v, out, dout) = (zeros()?, zeros()?, zeros()?, zeros()?, zeros()?);
    let attention = Attention::new();
    let (_, output) = attention.prepare(&fresh, [&q, &k, &v, &out])?;
    let saved = Saved::new(&q, &k, &v, &output)?;
    let (_, gradients) = attention.prepare_backward(&fresh, &saved, &dout, None, &Wanted::qkv())?;
    // lse and delta of each row, which live as long as the call.
    let stats = 4 * attention.plan_backward(&fresh, &saved, &dout, None, &Wanted::qkv())?.plan.stats;
    let results = [gradients.dq, gradients.dk, gradients.dv, output.lse, output.max];
    let mut buffers: Vec<&Tensor> = vec![&q, &k, &v, &out, &dout];
    for tensor in results.iter().flatten() {
        if buffers.iter().all(|other| other.buffer() != tensor.buffer()) {
            buffers.push(tensor);
        }
    }
    let tensors: u64 = buffers.iter().map(|tensor| fresh.size(tensor.buffer())).sum();
    let held = fresh.held();
    let bytes = tensors + stats + held.constant_bytes + held.scratch_bytes;
    let row = sizes.row("backward", "memory of a call with gradients", gpu, DType::F32, 1.0);
    Ok((Row { bytes, ..row }, bytes as f64 / f64::from(1 << 20)))
}
