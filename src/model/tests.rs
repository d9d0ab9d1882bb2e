//! The four places of a residual scheme and the freedom of a norm, proved on schemes that only these tests know: dense
//! connections between layers (the stack), a gain shared by a layer's sublayers (the layer and around), inner norms
//! (inside), and a norm with statistics across rows, a mask and state.

use super::context::{Context, Rates};
use super::layer::Stream;
use super::stack::Stack;
use super::{Builder, Packed, Ranges};
use crate::error::Result;
use crate::init::{self, Fill};
use crate::norm::{self, Norm, Rows, Site, Spec};
use crate::residual::{Around, Change, Combine, Flow, Inside, Place, Point, Scheme, Sublayer};
use std::collections::HashMap;
use tch::{no_grad, Device, Kind, Tensor};

const D: i64 = 8;
const KINDS: [Sublayer; 2] = [Sublayer::SelfAttention, Sublayer::FeedForward];

fn place(layers: i64, norm: &Spec) -> Place<'_> {
    Place {
        stack: crate::residual::Stack::Encoder,
        encoder_layers: layers,
        decoder_layers: layers,
        layer: 0,
        sublayer: Sublayer::SelfAttention,
        index: 0,
        sublayers: 2,
        d_model: D,
        d_ff: 12,
        norm,
        norm_eps: None,
    }
}

fn build(scheme: &dyn Scheme, layers: i64, norm: &Spec) -> (Stack, HashMap<String, Tensor>) {
    tch::manual_seed(1);
    let mut b = Builder::fresh(Device::Cpu, Kind::Double);
    let init = init::find("xavier").unwrap();
    let stack = Stack::build(&mut b, &place(layers, norm), &KINDS, 2, init, scheme).unwrap();
    let names = b.finish().unwrap().iter().map(|(n, t)| (n.to_string(), t.shallow_clone())).collect();
    (stack, names)
}

fn run(stack: &Stack, x: &Tensor, ctx: &Context) -> Tensor {
    let input = Packed::of(&[&[4, 5, 6], &[7, 8]], Device::Cpu).unwrap();
    let own = Ranges::between(&input.offsets, &input.offsets, Device::Cpu).unwrap();
    stack.forward(x.shallow_clone(), &own, true, None, ctx).unwrap()
}

fn rows() -> Tensor {
    tch::manual_seed(2);
    Tensor::randn([5, D], (Kind::Double, Device::Cpu))
}

fn close(a: &Tensor, b: &Tensor) -> bool {
    a.allclose(b, 1e-10, 1e-12, false)
}

fn layer_norm() -> &'static Spec {
    norm::find("layernorm").unwrap()
}

/// x⁺ = x + g·F(x), with g one scalar per layer, and each layer's input a learned sum of all outputs so far.
struct Dense;

struct Sums(Tensor);

impl Combine for Sums {
    fn input(&self, outputs: &[Tensor], _: &Rows) -> Result<Tensor> {
        let weights = self.0.f_get(outputs.len() as i64 - 1)?;
        let terms = outputs.iter().enumerate().map(|(k, y)| y * weights.get(k as i64));
        Ok(terms.reduce(|a, b| a + b).expect("the embedding is always there"))
    }
}

impl Scheme for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }
    fn equation(&self) -> &'static str {
        ""
    }
    fn source(&self) -> &'static str {
        ""
    }
    fn layer(&self, b: &mut Builder, _: &Place) -> Result<Vec<Tensor>> {
        Ok(vec![b.parameter("gain", &[1], &Fill::Constant(0.5))?])
    }
    fn around(&self, _: &mut Builder, _: &Place, shared: &[Tensor]) -> Result<Around> {
        Ok(Around { beta: Some(shared[0].shallow_clone()), ..Around::default() })
    }
    fn stack(&self, b: &mut Builder, place: &Place) -> Result<Flow> {
        let n = place.layers() + 1;
        let weights = b.parameter("sums", &[n, n], &Fill::Normal { std: 1.0 })?;
        Ok(Flow { combine: Some(Box::new(Sums(weights))), end: None })
    }
}

#[test]
fn the_stack_and_the_layer() {
    let (stack, names) = build(&Dense, 2, layer_norm());
    let x = rows();
    let y = run(&stack, &x, &Context::evaluation(Kind::Double));
    // The same from one-layer stacks whose sums pass everything on.
    let w = &names["sums"];
    let layer = |index: i64, x: &Tensor| {
        let own: HashMap<String, Tensor> = names
            .iter()
            .filter_map(|(n, t)| Some((n.strip_prefix(&format!("layers.{index}."))?.to_string(), t)))
            .map(|(n, t)| (format!("layers.0.{n}"), t.shallow_clone()))
            .chain([("sums".to_string(), Tensor::from_slice(&[1f64, 0., 0., 1.]).reshape([2, 2]))])
            .collect();
        let mut b = Builder::given(&own);
        let init = init::find("xavier").unwrap();
        let one = Stack::build(&mut b, &place(1, layer_norm()), &KINDS, 2, init, &Dense).unwrap();
        run(&one, x, &Context::evaluation(Kind::Double))
    };
    let at = |r: i64, c: i64| w.double_value(&[r, c]);
    let y1 = layer(0, &(&x * at(0, 0)));
    let y2 = layer(1, &(&x * at(1, 0) + &y1 * at(1, 1)));
    let expected = &x * at(2, 0) + &y1 * at(2, 1) + &y2 * at(2, 2);
    assert!(close(&y, &expected));
    y.square().sum(Kind::Double).backward();
    assert!(names
        .iter()
        .all(|(n, t)| t.grad().defined() && (n == "sums" || t.grad().abs().max().double_value(&[]) > 0.0)));
}

/// PreNorm with a norm after the joined heads and one amid the feed-forward.
struct Inner;

impl Scheme for Inner {
    fn name(&self) -> &'static str {
        "inner"
    }
    fn equation(&self) -> &'static str {
        ""
    }
    fn source(&self) -> &'static str {
        ""
    }
    fn around(&self, b: &mut Builder, place: &Place, _: &[Tensor]) -> Result<Around> {
        Ok(Around { before: Some(place.norm(b, &place.norm_name(), false)?), ..Around::default() })
    }
    fn inside(&self, b: &mut Builder, place: &Place) -> Result<Inside> {
        let (point, width) = match place.sublayer {
            Sublayer::FeedForward => (Point::Amid, place.d_ff),
            _ => (Point::AfterHeads, place.d_model),
        };
        let site = Site { width, eps: None, last_of_decoder: false };
        let norm = b.within(&format!("inner{}", place.index), |b| (place.norm.build)(b, &site))?;
        Ok(Inside(vec![(point, Change::Norm(norm))]))
    }
    fn stack(&self, b: &mut Builder, place: &Place) -> Result<Flow> {
        Ok(Flow { end: Some(place.norm(b, "norm", true)?), ..Flow::default() })
    }
}

#[test]
fn inside_a_sublayer() {
    let (stack, names) = build(&Inner, 1, layer_norm());
    assert_eq!(names["layers.0.inner1.weight"].size(), [12]);
    let x = rows();
    // The inner norms make the output independent of the scale of what they normalise: of v's and of fc1's weights.
    let y = run(&stack, &x, &Context::evaluation(Kind::Double));
    no_grad(|| {
        let _ = names["layers.0.self_attn.in_proj_weight"].narrow(0, 2 * D, D).g_mul_scalar_(3.0);
        let _ = names["layers.0.linear1.weight"].shallow_clone().g_mul_scalar_(5.0);
    });
    let scaled = run(&stack, &x, &Context::evaluation(Kind::Double));
    // ε = 1e-5 is not scaled along
    assert!(y.allclose(&scaled, 1e-3, 1e-3, false) && !close(&y, &x));
    scaled.square().sum(Kind::Double).backward();
    assert!(names["layers.0.inner0.weight"].grad().abs().max().double_value(&[]) > 0.0);
}

/// x over the root of a running mean square, taken over real rows and moved once per training forward.
static RUNNING: Spec = Spec {
    name: "running",
    equation: "",
    source: "",
    build: |b, site| {
        let weight = b.parameter("weight", &[site.width], &Fill::Constant(1.0))?;
        let square = Tensor::f_ones([site.width].as_slice(), (weight.kind(), weight.device()))?;
        Ok(Box::new(Running { weight, square }))
    },
};

struct Running {
    weight: Tensor,
    square: Tensor,
}

impl Norm for Running {
    fn forward(&self, x: &Tensor, rows: &Rows) -> Result<Tensor> {
        let y = x.f_div(&self.square.f_sqrt()?)?.f_mul(&self.weight)?;
        if rows.train {
            let real = match rows.pad_mask {
                Some(mask) => x.f_index_select(0, &mask.f_logical_not()?.f_nonzero()?.f_squeeze_dim(1)?)?,
                None => x.shallow_clone(),
            };
            let now = no_grad(|| real.f_square()?.f_mean_dim([0i64].as_slice(), false, None))?;
            let _ = no_grad(|| self.square.shallow_clone().f_lerp_(&now, 0.1))?;
        }
        Ok(y)
    }
}

#[test]
fn a_norm_with_state() {
    let prenorm = crate::residual::find("prenorm").unwrap();
    let (stack, _) = build(prenorm, 1, &RUNNING);
    let x = rows();
    let evaluation = Context::evaluation(Kind::Double);
    let before = run(&stack, &x, &evaluation);
    assert!(close(&before, &run(&stack, &x, &evaluation)), "evaluation moves nothing");
    let seed = Tensor::from_slice(&[1i64, 1, 0]);
    let trained = run(&stack, &x, &Context::training(Rates::default(), seed, Kind::Double));
    assert!(close(&before, &trained), "the forward that moves the statistics still uses the old ones");
    assert!(!close(&before, &run(&stack, &x, &evaluation)), "a training forward moves them");

    let site = Site { width: D, eps: None, last_of_decoder: false };
    let norms = [(); 2].map(|()| (RUNNING.build)(&mut Builder::fresh(Device::Cpu, Kind::Double), &site).unwrap());
    let mask = Tensor::from_slice(&[false, false, true, true, true]);
    let _ = norms[0].forward(&x, &Rows { train: true, pad_mask: Some(&mask) }).unwrap();
    let _ = norms[1].forward(&x.narrow(0, 0, 2), &Rows { train: true, pad_mask: None }).unwrap();
    let [a, b] = norms.map(|n| n.forward(&x, &Rows::default()).unwrap());
    assert!(close(&a, &b), "padding enters no statistic");
}

#[test]
fn the_fused_step_is_the_unfused_one() {
    let (fused, names) = build(crate::residual::find("prenorm").unwrap(), 2, layer_norm());
    let x = rows();
    let y = run(&fused, &x, &Context::evaluation(Kind::Double));
    // Branch by branch, the norm apart from the step.
    let norm = |name: &str, x: &Tensor| {
        let (w, b) = (&names[&format!("{name}.weight")], &names[&format!("{name}.bias")]);
        x.layer_norm([D], Some(w), Some(b), 1e-5, false)
    };
    let mut stream = Stream { x: x.shallow_clone(), normed: None };
    let input = Packed::of(&[&[4, 5, 6], &[7, 8]], Device::Cpu).unwrap();
    let own = Ranges::between(&input.offsets, &input.offsets, Device::Cpu).unwrap();
    let ctx = Context::evaluation(Kind::Double);
    for (l, layer) in fused.layers().iter().enumerate() {
        for (s, branch) in layer.sublayers.iter().enumerate() {
            let n = norm(&format!("layers.{l}.norm{}", s + 1), &stream.x);
            let f = match &branch.function {
                super::layer::Function::FeedForward(f) => f.forward(&n, &branch.inside, &ctx).unwrap(),
                super::layer::Function::SelfAttention(a) | super::layer::Function::CrossAttention(a) => {
                    a.attend(&n, &own, true, &branch.inside, &ctx).unwrap()
                }
            };
            stream = Stream { x: stream.x + f, normed: None };
        }
    }
    assert!(close(&y, &norm("norm", &stream.x)));
}
