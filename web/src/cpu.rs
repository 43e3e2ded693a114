//! The cpu tier in a page: the core's own kernels on one core, in slices between which the page lives.

use std::sync::Arc;

use flexattn::cpu::Buffer as Memory;
use flexattn::kernels::Params;
use flexattn::{Binding, Cpu, Dispatch, Error, Result, Runtime};

use crate::runtime::Buffer;

/// How long a slice should take, in milliseconds: a frame has 16. It is at least one workgroup.
const SLICE: f64 = 10.0;

/// Runs the launches in order. Work that takes longer than a slice is cut by workgroups.
pub(crate) async fn run(cpu: &Cpu, dispatches: &[Dispatch<Buffer>]) -> Result<()> {
    let mut started = now();
    for dispatch in dispatches {
        let whole = translate(dispatch)?;
        let (head, _) = whole
            .params
            .split_first_chunk::<{ size_of::<Params>() }>()
            .ok_or_else(|| Error::buffer("the parameter block is cut short"))?;
        let params: Params = bytemuck::pod_read_unaligned(head);
        let groups: u64 = whole.grid.iter().map(|&n| u64::from(n)).product();
        let end = (u64::from(params.first_group) + groups).min(params.groups.into()) as u32;
        let mut first = params.first_group;
        let mut count = 1;
        while first < end {
            let next = first.saturating_add(count).min(end);
            let mut slice = whole.clone();
            let part = Params { first_group: first, ..params };
            slice.params[..size_of::<Params>()].copy_from_slice(bytemuck::bytes_of(&part));
            slice.grid = [next - first, 1, 1];
            let before = now();
            cpu.run(&[slice])?;
            first = next;
            let took = now() - before;
            if now() - started >= SLICE {
                crate::pause().await;
                started = now();
            }
            // As many as fit into what is left of the slice; at most twice the last, since rows differ in work.
            let left = SLICE - (now() - started);
            let fitting = if took > 0.0 { f64::from(count) * left / took } else { f64::INFINITY };
            count = (fitting as u32).clamp(1, count.saturating_mul(2));
        }
    }
    Ok(())
}

/// The same launch on the core's own buffers.
fn translate(dispatch: &Dispatch<Buffer>) -> Result<Dispatch<Memory>> {
    let bindings = dispatch.bindings.iter().map(|binding| {
        let buffer = binding.buffer.cpu()?.clone();
        Ok(Binding { buffer, offset: binding.offset, size: binding.size })
    });
    Ok(Dispatch {
        spec: Arc::clone(&dispatch.spec),
        bindings: bindings.collect::<Result<_>>()?,
        params: dispatch.params.clone(),
        grid: dispatch.grid,
    })
}

/// Milliseconds, from the page's clock.
fn now() -> f64 {
    js_sys::Date::now()
}
