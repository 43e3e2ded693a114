//! A call and its gradients beside the reference.

use flexattn::reference::{self, Problem};
use flexattn::{
    Attention, AttentionShape, DType, Gpu, Gradients, Layout, MaskMod, Saved, ScoreMod, Tensor, Wanted,
};
use flexattn_testing::problem::{Inputs, Sizes};

use super::{bits, upload};

/// What a call is made of.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) inputs: Inputs,
    pub(super) mask: Option<MaskMod>,
    pub(super) score: Option<ScoreMod>,
    pub(super) q_offset: Vec<i32>,
    pub(super) kv_len: Vec<u32>,
    pub(super) sinks: Vec<f32>,
    pub(super) dlse: Vec<f32>,
}

impl Case {
    pub(super) fn new(sizes: Sizes) -> Self {
        Self {
            inputs: Inputs::normal(sizes, 3),
            mask: None,
            score: None,
            q_offset: Vec::new(),
            kv_len: Vec::new(),
            sinks: Vec::new(),
            dlse: Vec::new(),
        }
    }

    pub(super) fn attention(&self) -> Attention {
        let mut attention = Attention::new();
        if let Some(mask) = &self.mask {
            attention = attention.mask_mod(mask.clone());
        }
        if let Some(score) = &self.score {
            attention = attention.score_mod(score.clone());
        }
        if !self.q_offset.is_empty() {
            attention = attention.q_offset(self.q_offset.clone());
        }
        if !self.kv_len.is_empty() {
            attention = attention.kv_len(self.kv_len.clone());
        }
        if !self.sinks.is_empty() {
            attention = attention.sinks(self.sinks.clone());
        }
        attention
    }

    pub(super) fn tensors(&self, gpu: &Gpu) -> [Tensor; 4] {
        let Inputs { sizes, q, k, v, dout } = &self.inputs;
        let shapes = [sizes.q_shape(), sizes.k_shape(), sizes.v_shape(), sizes.out_shape()];
        let mut all = [q, k, v, dout].into_iter().zip(shapes);
        std::array::from_fn(|_| all.next().map(|(x, shape)| upload(gpu, x, shape, DType::F32)).unwrap())
    }

    pub(super) fn run(&self, gpu: &Gpu, wanted: &Wanted) -> flexattn::Result<Gradients> {
        let [q, k, v, dout] = self.tensors(gpu);
        let attention = self.attention();
        let output = attention.forward(gpu, &q, &k, &v)?;
        let [b, h, l, _] = output.out.shape();
        let dlse = (!self.dlse.is_empty()).then(|| upload(gpu, &self.dlse, [b, h, l, 1], DType::F32));
        attention.backward(gpu, &Saved::new(&q, &k, &v, &output)?, &dout, dlse.as_ref(), wanted)
    }

    pub(super) fn reference(&self) -> reference::Gradients {
        let Inputs { sizes, q, k, v, dout } = &self.inputs;
        let [q_layout, k_layout, v_layout] = [sizes.q_shape(), sizes.k_shape(), sizes.v_shape()]
            .map(|shape| Layout::contiguous(shape).unwrap());
        let problem = Problem {
            mask_mod: self.mask.as_ref(),
            score_mod: self.score.as_ref(),
            q_offset: &self.q_offset,
            kv_len: &self.kv_len,
            sinks: &self.sinks,
            ..Problem::new(AttentionShape::new(&q_layout, &k_layout, &v_layout).unwrap(), q, k, v)
        };
        reference::backward(&problem, dout, &self.dlse).unwrap()
    }

    /// Compares every gradient of q, k, v, the sinks, and the captured tensors of these names; the
    /// second run has to give the same bits, but for the tensors in `atomic`.
    pub(super) fn check(&self, gpu: &Gpu, captures: &[&str], atomic: &[&str]) {
        let mut wanted = captures.iter().fold(Wanted::qkv(), |wanted, name| wanted.capture(*name));
        wanted.sinks = !self.sinks.is_empty();
        let read = |found: Gradients| {
            let own = [("dq", found.dq), ("dk", found.dk), ("dv", found.dv), ("dsinks", found.dsinks)];
            let own = own.into_iter().filter_map(|(name, tensor)| Some((name.to_owned(), tensor?)));
            let all = own.chain(found.captures);
            all.map(|(name, tensor)| (name, tensor.read().unwrap())).collect::<Vec<_>>()
        };
        let got = read(self.run(gpu, &wanted).unwrap());
        let again = read(self.run(gpu, &wanted).unwrap());
        let exact = self.reference();
        for ((name, got), (_, again)) in got.iter().zip(&again) {
            let exact = match name.as_str() {
                "dq" => &exact.dq,
                "dk" => &exact.dk,
                "dv" => &exact.dv,
                "dsinks" => &exact.sinks,
                name => &exact.captures.iter().find(|(known, _)| known == name).unwrap().1,
            };
            assert_eq!(got.len(), exact.len(), "{name}");
            let largest = exact.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
            for (i, (&got, exact)) in got.iter().zip(exact).enumerate() {
                let error = (f64::from(got) - exact).abs();
                let good = error <= 1e-4 * largest + 1e-7;
                assert!(good, "{}: {name}[{i}] is {got}, not {exact}; the largest is {largest}", gpu.tier());
            }
            if !atomic.contains(&name.as_str()) || gpu.tier() == flexattn::Tier::Cpu {
                assert_eq!(bits(got), bits(again), "{}: two runs of {name} differ", gpu.tier());
            }
        }
        assert_eq!(got.len(), 3 + captures.len() + usize::from(wanted.sinks));
    }
}
