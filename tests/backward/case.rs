//! A call and its gradients beside the reference.

use std::any::Any;

use flexattn::reference::{self, Problem, Reference};
use flexattn::{
    Attention, AttentionShape, Gradients, Layout, MaskMod, Runtime, Saved, ScoreMod, Tensor, Tier, Wanted,
};
use flexattn_testing::problem::{Inputs, Sizes};

use super::bits;

/// What a call is made of.
#[derive(Clone, Debug)]
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

    pub(super) fn tensors<R: Runtime>(&self, on: &R) -> [Tensor<R>; 4] {
        let Inputs { sizes, q, k, v, dout } = &self.inputs;
        let shapes = [sizes.q_shape(), sizes.k_shape(), sizes.v_shape(), sizes.out_shape()];
        let mut all = [q, k, v, dout].into_iter().zip(shapes);
        std::array::from_fn(|_| all.next().map(|(x, shape)| Tensor::upload(on, x, shape).unwrap()).unwrap())
    }

    pub(super) fn run<R: Runtime>(&self, on: &R, wanted: &Wanted) -> flexattn::Result<Gradients<R>>
    where
        R::Buffer: Any + PartialEq,
    {
        let [q, k, v, dout] = self.tensors(on);
        let attention = self.attention();
        let output = attention.forward(on, &q, &k, &v)?;
        let [b, h, l, _] = output.out.shape();
        let dlse = (!self.dlse.is_empty()).then(|| Tensor::upload(on, &self.dlse, [b, h, l, 1]).unwrap());
        attention.backward(on, &Saved::new(&q, &k, &v, &output)?, &dout, dlse.as_ref(), wanted)
    }

    fn reference(&self) -> (Reference, reference::Gradients) {
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
        let forward = reference::forward(&problem).unwrap();
        (forward, reference::backward(&problem, dout, &self.dlse).unwrap())
    }

    /// Compares out, lse and max.
    pub(super) fn check_forward<R: Runtime>(&self, on: &R)
    where
        R::Buffer: Any + PartialEq,
    {
        let [q, k, v, _] = self.tensors(on);
        let found = self.attention().with_max(true).forward(on, &q, &k, &v).unwrap();
        let (exact, _) = self.reference();
        let parts = [("out", &found.out, &exact.out)];
        let stats = [("lse", &found.lse, &exact.lse), ("max", &found.max, &exact.max)];
        let stats = stats.into_iter().map(|(name, got, exact)| (name, got.as_ref().unwrap(), exact));
        for (name, got, exact) in parts.into_iter().chain(stats) {
            let got = got.read().unwrap();
            assert_eq!(got.len(), exact.len());
            for (i, (&got, &exact)) in got.iter().zip(exact).enumerate() {
                let error = (f64::from(got) - exact).abs();
                let good = error <= 2e-5 * exact.abs().max(1.0) || f64::from(got) == exact;
                assert!(good, "{}: {name}[{i}] is {got}, not {exact}", on.profile().tier);
            }
        }
    }

    /// Compares every gradient of q, k, v, the sinks, and the captured tensors of these names; the
    /// second run has to give the same bits, but for the tensors in `atomic`.
    pub(super) fn check<R: Runtime>(&self, on: &R, captures: &[&str], atomic: &[&str])
    where
        R::Buffer: Any + PartialEq,
    {
        let tier = on.profile().tier;
        let mut wanted = captures.iter().fold(Wanted::qkv(), |wanted, name| wanted.capture(*name));
        wanted.sinks = !self.sinks.is_empty();
        let read = |found: Gradients<R>| {
            let own = [("dq", found.dq), ("dk", found.dk), ("dv", found.dv), ("dsinks", found.dsinks)];
            let own = own.into_iter().filter_map(|(name, tensor)| Some((name.to_owned(), tensor?)));
            let all = own.chain(found.captures);
            all.map(|(name, tensor)| (name, tensor.read().unwrap())).collect::<Vec<_>>()
        };
        let got = read(self.run(on, &wanted).unwrap());
        let again = read(self.run(on, &wanted).unwrap());
        let (_, exact) = self.reference();
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
                assert!(good, "{tier}: {name}[{i}] is {got}, not {exact}; the largest is {largest}");
            }
            if !atomic.contains(&name.as_str()) || tier == Tier::Cpu {
                assert_eq!(bits(got), bits(again), "{tier}: two runs of {name} differ");
            }
        }
        assert_eq!(got.len(), 3 + captures.len() + usize::from(wanted.sinks));
    }
}
