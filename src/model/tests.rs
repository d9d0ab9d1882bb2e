//! Tests of the model apart from the schemes' equations, which `tests/model` checks: fusing the residual step with the
//! norm that follows, profiling, growth, and the state of norms.

use super::layer::{BuiltSublayer, SublayerFunction};
use super::norm::{Norm, RowContext};
use super::stack::{Stack, StackCache};
use super::{Builder, Context, Packed, Ranges, Sentences, Transformer};
use crate::config::TransformerConfig;
use crate::error::Result;
use crate::init;
use crate::residual::{
    self, ExtraStream, Gain, Learned, ResidualSpec, Scheme, SchemeRef, Schemes, StackSpec, StreamStep,
};
use std::collections::BTreeMap;
use tch::{no_grad, Device, Kind, Tensor};

const D: i64 = 8;

/// Returns the configuration of a small language model with this scheme.
fn config(residual: &str, layers: i64) -> TransformerConfig {
    let text = format!(
        r#"{{"architecture": "decoder-only", "residual": "{residual}", "d_model": {D}, "d_ff": 12, "heads": 2,
            "vocab_size": 12, "decoder_layers": {layers}, "init": "xavier"}}"#
    );
    crate::config::from_json("model", &text).unwrap()
}

/// Builds the decoder of a configuration, and returns it with its parameters and buffers by name.
fn build(config: &TransformerConfig) -> (Stack, BTreeMap<String, Tensor>) {
    build_of(config, config.schemes())
}

/// Builds the decoder as [`build`] does, but with other schemes than the configuration's.
fn build_of(config: &TransformerConfig, schemes: &Schemes) -> (Stack, BTreeMap<String, Tensor>) {
    tch::manual_seed(1);
    let mut b = Builder::fresh(4, Device::Cpu, Kind::Double);
    let init = init::find("xavier").unwrap();
    let place = config.place(residual::StackName::Decoder, 0);
    let stack = Stack::build(&mut b, &place, init, schemes).unwrap();
    let made = b.finish().unwrap();
    let names = made.iter().chain(made.buffers()).map(|(n, t)| (n.to_string(), t.shallow_clone())).collect();
    (stack, names)
}

/// Runs a stack on two sentences of three and two tokens; x is (5, D).
fn run(stack: &Stack, x: &Tensor, ctx: &Context) -> Tensor {
    let input = Packed::of(&[&[4, 5, 6], &[7, 8]]).unwrap();
    let own = Ranges::causal(&input, Device::Cpu).unwrap();
    stack.forward(x.shallow_clone(), &own, true, None, ctx).unwrap()
}

/// Returns F(x) of one sublayer, on the rows that [`run`] reads.
fn function(branch: &BuiltSublayer, x: &Tensor) -> Tensor {
    let ctx = Context::evaluation(Kind::Double);
    let input = Packed::of(&[&[4, 5, 6], &[7, 8]]).unwrap();
    let own = Ranges::causal(&input, Device::Cpu).unwrap();
    let f = match &branch.function {
        SublayerFunction::FeedForward(f) => f.forward(x, &branch.inside, &ctx),
        SublayerFunction::SelfAttention(a) | SublayerFunction::CrossAttention(a) => {
            a.attend(x, &own, true, &branch.inside, &ctx)
        }
        SublayerFunction::Tensorized(a) => a.attend(x, &own, &branch.inside, &ctx),
    };
    f.unwrap()
}

/// Returns five random rows, which are the same in every call.
fn rows() -> Tensor {
    tch::manual_seed(2);
    Tensor::randn([5, D], (Kind::Double, Device::Cpu))
}

/// True if the tensors are equal up to rounding.
fn close(a: &Tensor, b: &Tensor) -> bool {
    a.allclose(b, 1e-10, 1e-12, false)
}

/// A norm that divides x by the root of a running mean square. The mean is over real rows, and is updated once per
/// forward pass in training.
struct Running {
    weight: Tensor,
    square: Tensor,
}

impl Running {
    fn new() -> Self {
        let [weight, square] = [(); 2].map(|()| Tensor::ones([D], (Kind::Double, Device::Cpu)));
        Running { weight, square }
    }
}

impl Norm for Running {
    fn forward(&self, x: &Tensor, rows: &RowContext) -> Result<Tensor> {
        let y = x.f_div(&self.square.f_sqrt()?)?.f_mul(&self.weight)?;
        if rows.train {
            let real = match rows.pad_mask {
                Some(mask) => x.f_index_select(0, &mask.f_logical_not()?.f_nonzero()?.f_squeeze_dim(1)?)?,
                None => x.shallow_clone(),
            };
            let batch_square = no_grad(|| real.f_square()?.f_mean_dim([0i64].as_slice(), false, None))?;
            let _ = no_grad(|| self.square.shallow_clone().f_lerp_(&batch_square, 0.1))?;
        }
        Ok(y)
    }
}

#[test]
fn a_norm_with_state() {
    let norms = [(); 2].map(|()| Running::new());
    let x = rows();
    let mask = Tensor::from_slice(&[false, false, true, true, true]);
    let before = norms[0].forward(&x, &RowContext::default()).unwrap();
    let trained =
        norms[0].forward(&x, &RowContext { train: true, pad_mask: Some(&mask), ..RowContext::default() }).unwrap();
    assert!(close(&before, &trained), "the forward that moves the statistics still uses the old ones");
    let _ = norms[1].forward(&x.narrow(0, 0, 2), &RowContext { train: true, ..RowContext::default() }).unwrap();
    let [with_padding, without] = norms.map(|norm| norm.forward(&x, &RowContext::default()).unwrap());
    assert!(!close(&before, &with_padding), "a training forward moves them");
    assert!(close(&with_padding, &without), "padding enters no statistic");
}

#[test]
fn growth_follows_the_update() {
    let (stack, names) = build(&config("branchnorm", 1));
    let evaluation = Context::evaluation(Kind::Double);
    let first = run(&stack, &rows(), &evaluation);
    assert_eq!(names["t"].int64_value(&[0]), 1);
    let _ = names["t"].shallow_clone().fill_(4000);
    let grown = run(&stack, &rows(), &evaluation);
    let (postnorm, _) = build(&config("postnorm", 1));
    assert!(close(&grown, &run(&postnorm, &rows(), &evaluation)) && !close(&grown, &first));
}

#[test]
fn an_update_sets_every_clock() {
    let text = r#"{"architecture": "decoder-only", "residual": "branchnorm", "norm": "prepbn", "d_model": 8, "d_ff": 12,
        "heads": 2, "vocab_size": 12, "decoder_layers": 2}"#;
    let config = crate::config::from_json("model", text).unwrap();
    let model = Transformer::new(&config, 1, Device::Cpu, Kind::Float).unwrap();
    model.set_update(7).unwrap();
    let (clocks, others): (Vec<_>, Vec<_>) = model.parameters.buffers().partition(|(name, _)| name.ends_with(".t"));
    assert_eq!(clocks.iter().map(|(_, t)| t.int64_value(&[0])).collect::<Vec<_>>(), [7; 5], "a stack and four norms");
    assert_eq!(others.len(), 8, "two statistics of each norm, which stay");
    assert!(others.iter().all(|(_, t)| t.max().double_value(&[]) <= 1.0));
}

#[test]
fn profiling_makes_each_sum_as_wide_as_its_gain() {
    let (stack, names) = build(&config("admin", 2));
    let ctx = Context::evaluation(Kind::Double).profiling();
    let x = rows();
    let _ = no_grad(|| run(&stack, &x, &ctx));
    let omega =
        |layer: i64, sublayer: i64| names[&format!("layers.{layer}.residual_scale{sublayer}")].double_value(&[0]);
    assert_eq!(omega(0, 1), 1.0);
    assert!(omega(0, 1) < omega(0, 2) && omega(0, 2) < omega(1, 1) && omega(1, 1) < omega(1, 2));
}

#[test]
fn decoding_token_by_token_is_reading_the_whole_sentence() {
    let input = Packed::of(&[&[4, 5, 6, 7, 8]]).unwrap();
    let own = Ranges::causal(&input, Device::Cpu).unwrap();
    let ctx = Context::evaluation(Kind::Double);
    let schemes = residual::SCHEMES.iter().map(|scheme| config(scheme.name, 2));
    let with_qk_norm = TransformerConfig { qk_norm: true, ..config("prenorm", 2) };
    let with_lengths_of_one = TransformerConfig { qk_l2norm: Some(30), ..config("prenorm", 2) };
    let with_sinks = TransformerConfig { sinks: true, ..config("prenorm", 2) };
    let with_capped_scores = TransformerConfig { score_softcap: Some(0.5), ..config("prenorm", 2) };
    let others = [config("postnorm*1,prenorm", 2), with_qk_norm, with_lengths_of_one, with_sinks, with_capped_scores];
    for config in schemes.chain(others) {
        let (stack, names) = build(&config);
        for parameter in names.values().filter(|t| t.kind() == Kind::Double) {
            let _ = no_grad(|| parameter.shallow_clone().f_add_(&(parameter.randn_like() * 0.1)));
        }
        let whole = stack.forward(rows(), &own, true, None, &ctx).unwrap();
        let mut cache = StackCache::default();
        let mut step = |i| stack.step(rows().narrow(0, i, 1), &mut cache, None, &ctx).unwrap();
        let steps: Vec<Tensor> = (0..5).map(&mut step).collect();
        assert!(close(&whole, &Tensor::cat(&steps, 0)), "{config:?}");
        let mut cache = StackCache::default();
        let mut step = |i| no_grad(|| stack.step(rows().narrow(0, i, 1), &mut cache, None, &ctx).unwrap());
        let steps: Vec<Tensor> = (0..5).map(&mut step).collect();
        assert!(close(&whole, &Tensor::cat(&steps, 0)), "{config:?} without gradients");
    }
}

/// Hypotheses split and end as in a beam. Each step must give a hypothesis the same result as a pass over its whole
/// sequence, even after the cache has dropped rows that no slot reads. Attention takes different paths with and
/// without gradients.
#[test]
fn slots_that_move_keep_their_past() {
    const SLOTS: i64 = 48;
    let (stack, _) = build(&config("prenorm", 2));
    let ctx = || Context::evaluation(Kind::Double);
    // Runs this many steps, checks some slots, and returns the number of rows in the cache.
    let check = |steps: i64| {
        let mut cache = StackCache::default();
        let mut histories: Vec<Vec<Tensor>> = (0..SLOTS).map(|_| vec![]).collect();
        let mut output = Tensor::new();
        for t in 0..steps {
            if t > 0 {
                // Slots 0 to 3 continue, each in twelve slots.
                let order: Vec<i64> = (0..SLOTS).map(|i| (i * 5 + t) % 4).collect();
                histories =
                    order.iter().map(|&i| histories[i as usize].iter().map(Tensor::shallow_clone).collect()).collect();
                cache.reorder(&Tensor::from_slice(&order)).unwrap();
            }
            tch::manual_seed(100 + t);
            let x = Tensor::randn([SLOTS, D], (Kind::Double, Device::Cpu));
            (0..SLOTS).for_each(|i| histories[i as usize].push(x.get(i)));
            output = stack.step(x, &mut cache, None, &ctx()).unwrap();
        }
        for slot in [0, 1, 17, SLOTS - 1] {
            let whole = Tensor::stack(&histories[slot as usize], 0);
            let input = Packed::new(&vec![4; steps as usize], &(0..steps).collect::<Vec<_>>(), vec![0, steps]).unwrap();
            let own = Ranges::causal(&input, Device::Cpu).unwrap();
            let wanted = stack.forward(whole, &own, true, None, &ctx()).unwrap().get(-1);
            assert!(close(&wanted, &output.get(slot)), "slot {slot} after {steps} steps");
        }
        cache.rows() as i64
    };
    assert_eq!(check(6), 6 * SLOTS);
    no_grad(|| {
        assert_eq!(check(6), 6 * SLOTS);
        let kept = check(70);
        // The cache may hold four times the 69·4 + 48 rows that are read.
        assert!(kept < 1296, "{kept} rows of {}", 70 * SLOTS);
    });
}

#[test]
fn a_step_of_more_tokens_than_slots_is_refused() {
    let (stack, _) = build(&config("prenorm", 1));
    let (ctx, mut cache) = (Context::evaluation(Kind::Double), StackCache::default());
    let _ = stack.step(rows(), &mut cache, None, &ctx).unwrap();
    let e = stack.step(rows().narrow(0, 0, 2), &mut cache, None, &ctx).unwrap_err().to_string();
    assert!(e.contains("5 slots, but 2 tokens"), "{e}");
}

/// A scheme with three streams: x⁺ = x + f, s⁺ = a⊙s + f and t⁺ = 2t + f, with f = F(x). The stack ends with x + N(s)
/// + t.
static THREE_STREAMS: Scheme = Scheme {
    name: "three streams",
    around: |place| {
        let a = Learned::new(place.numbered("a"), &[D], 0.5);
        let steps = [Gain::Learned(a), Gain::Constant(2.0)];
        let streams = steps.map(|alpha| StreamStep { alpha, beta: Gain::One }).into();
        ResidualSpec { streams, ..ResidualSpec::default() }
    },
    stack: |place| {
        let streams = vec![ExtraStream { norm: Some(place.end_norm()) }, ExtraStream { norm: None }];
        StackSpec { streams, ..StackSpec::default() }
    },
    ..Scheme::PLAIN
};

#[test]
fn streams_travel_beside_x() {
    let (stack, names) = build_of(&config("t-fixup", 2), &Schemes::of(SchemeRef::Table(&THREE_STREAMS)));
    let [mut x, mut s, mut t] = [(); 3].map(|()| rows());
    for (l, layer) in stack.layers().iter().enumerate() {
        for (i, branch) in layer.sublayers.iter().enumerate() {
            let f = function(branch, &x);
            s = s * &names[&format!("layers.{l}.a{}", i + 1)] + &f;
            t = t * 2.0 + &f;
            x += f;
        }
    }
    let norm = s.layer_norm([D], Some(&names["norm.weight"]), Some(&names["norm.bias"]), 1e-5, false);
    assert!(close(&run(&stack, &rows(), &Context::evaluation(Kind::Double)), &(x + norm + t)));
}

#[test]
fn recomputation_carries_every_stream() {
    let (stack, names) = build_of(&config("t-fixup", 2), &Schemes::of(SchemeRef::Table(&THREE_STREAMS)));
    let gradients = |recompute: bool| {
        let x = rows().set_requires_grad(true);
        let ctx = Context::evaluation(Kind::Double).recomputing(recompute);
        run(&stack, &x, &ctx).square().sum(Kind::Double).backward();
        let mut leaves: Vec<(&String, &Tensor)> = names.iter().collect();
        leaves.sort_by_key(|(name, _)| *name);
        let all: Vec<Tensor> = leaves.iter().map(|(_, t)| t.grad().copy()).collect();
        leaves.iter().for_each(|(_, t)| t.shallow_clone().zero_grad());
        (all, x.grad().copy())
    };
    let ((plain, x), (again, x_again)) = (gradients(false), gradients(true));
    assert_eq!(plain, again);
    // The three streams all begin with x, and the order in which autograd sums their gradients differs.
    let largest = |t: &Tensor| t.abs().max().double_value(&[]);
    let (apart, size) = (largest(&(&x - x_again)), largest(&x));
    assert!(apart < 1e-14 * size, "{apart} of {size}");
}

#[test]
fn the_fused_step_is_the_unfused_one() {
    let (fused, names) = build(&config("prenorm", 2));
    let x = rows();
    let y = run(&fused, &x, &Context::evaluation(Kind::Double));
    // The expected values are computed sublayer by sublayer, without fusing the norm with the step.
    let norm = |name: &str, x: &Tensor| {
        let (w, b) = (&names[&format!("{name}.weight")], &names[&format!("{name}.bias")]);
        x.layer_norm([D], Some(w), Some(b), 1e-5, false)
    };
    let mut stream = x.shallow_clone();
    for (l, layer) in fused.layers().iter().enumerate() {
        for (s, branch) in layer.sublayers.iter().enumerate() {
            let normed = norm(&format!("layers.{l}.norm{}", s + 1), &stream);
            stream += function(branch, &normed);
        }
    }
    assert!(close(&y, &norm("norm", &stream)));
}

/// Positions, activations, shared keys and options of attention, each at least once.
const ARCHITECTURES: [&str; 12] = [
    r#""positions": "rotary", "activation": "swiglu", "kv_heads": 2, "linear_biases": false, "scale_embeddings": false"#,
    r#""positions": "rotary", "rope_theta": 100, "kv_heads": 1, "qk_norm": true, "norm": "rmsnorm""#,
    r#""positions": "rotary", "kv_heads": 2, "residual": "olmo2""#,
    r#""positions": "learned", "max_positions": 20, "activation": "gelu", "tie_embeddings": "none""#,
    r#""positions": "none", "activation": "silu", "residual": "hybridnorm", "kv_heads": 2"#,
    r#""activation": "geglu", "kv_heads": 4, "residual": "subln""#,
    r#""output_gate": "head", "residual": "normformer""#,
    r#""output_gate": "element", "kv_heads": 2, "positions": "rotary", "logit_softcap": 2.0"#,
    r#""norm": "rmsnorm", "positions": "rotary", "kv_heads": 2, "qk_norm": true, "qk_norm_over": "all-heads",
        "qk_norm_after_rotation": true, "qk_norm_weight": false, "qk_norm_scale": 1.2, "v_norm": "unweighted""#,
    r#""sinks": true"#,
    r#""sinks": true, "score_softcap": 0.5, "kv_heads": 2, "positions": "rotary""#,
    r#""value_embeddings": true, "smear": true, "residual": "x0-lambdas", "kv_heads": 2"#,
];

/// Returns each of the architectures as a decoder alone, and with an encoder if its options allow one.
fn architectures() -> impl Iterator<Item = (&'static str, &'static str)> {
    let both = ARCHITECTURES.into_iter().flat_map(|options| ["decoder-only", "encoder-decoder"].map(|a| (options, a)));
    both.filter(|(options, architecture)| *architecture == "decoder-only" || !options.contains("smear"))
}

/// Builds a model with these options, and changes its parameters from their initial values.
fn model(options: &str, architecture: &str) -> Transformer {
    let text = format!(
        r#"{{"architecture": "{architecture}", "d_model": {D}, "d_ff": 12, "heads": 4, "vocab_size": 12,
            "encoder_layers": 2, "decoder_layers": 2, "init": "xavier", "dropout": 0.3, {options}}}"#
    );
    tch::manual_seed(3);
    let config = crate::config::from_json("model", &text).unwrap();
    let model = Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap();
    for (_, parameter) in model.parameters.iter() {
        let _ = no_grad(|| parameter.shallow_clone().f_add_(&(parameter.randn_like() * 0.1)));
    }
    model
}

#[test]
fn steps_read_what_the_whole_pass_reads() {
    let sentences: [Vec<i64>; 2] = [(0..19).map(|i| 4 + i % 8).collect(), (0..19).map(|i| 4 + i * i % 8).collect()];
    let read = |sentences: &[Vec<i64>]| Packed::of(&sentences.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
    let ctx = Context::evaluation(Kind::Double);
    for (options, architecture) in architectures() {
        let model = model(options, architecture);
        let source = model.config.has_encoder().then(|| Packed::of(&[&[5, 9, 2], &[7, 2]]).unwrap());
        let memory = source.as_ref().and_then(|source| model.encode(source, &ctx).unwrap());
        let whole = Sentences::new(source, read(&sentences), Device::Cpu).unwrap();
        let whole = model.logits(&model.features(&whole, &ctx).unwrap(), Kind::Double).unwrap();
        let mut cache = StackCache::default();
        // Halfway the slots change places. By then the cache has outgrown its initial capacity.
        let mut slots = [0usize, 1];
        for position in 0..19 {
            if position == 17 {
                slots.reverse();
                cache.reorder(&Tensor::from_slice(&[1i64, 0])).unwrap();
            }
            let tokens = slots.map(|s| sentences[s][position]);
            let step = model.step(&tokens, &[position as i64; 2], &slots, memory.as_ref(), &mut cache, &ctx).unwrap();
            for (i, s) in slots.into_iter().enumerate() {
                let (step, whole) = (step.get(i as i64), whole.get((s * 19 + position) as i64));
                assert!(close(&step, &whole), "{options} {architecture} {position}");
            }
        }
    }
}

#[test]
fn learned_positions_end() {
    let model = model(r#""positions": "learned", "max_positions": 3"#, "decoder-only");
    let (mut cache, ctx) = (StackCache::default(), Context::evaluation(Kind::Double));
    let mut step = |position| model.step(&[4], &[position], &[0], None, &mut cache, &ctx).map(drop);
    (0..3).try_for_each(&mut step).unwrap();
    let message = step(3).unwrap_err().to_string();
    assert!(
        message.contains("4 tokens in a row, and the model's learned positions are max_positions = 3"),
        "{message}"
    );
}

#[test]
fn layers_that_run_again_give_the_same_gradients() {
    for (options, architecture) in architectures() {
        let model = model(options, architecture);
        let read = || {
            let source = model.config.has_encoder().then(|| Packed::of(&[&[5, 9, 2], &[7, 2]]).unwrap());
            Sentences::new(source, Packed::of(&[&[4, 5, 6], &[7, 8]]).unwrap(), Device::Cpu).unwrap()
        };
        let gradients = |recompute: bool| -> Vec<Tensor> {
            let seed = Tensor::from_slice(&[7i64, 1, 0]);
            let ctx = Context::training(super::Rates::of(&model.config), seed, Kind::Double).recomputing(recompute);
            let features = model.features(&read(), &ctx).unwrap();
            model.logits(&features, Kind::Double).unwrap().square().sum(Kind::Double).backward();
            let parameters = model.parameters.tensors();
            parameters.iter().map(|t| t.grad().copy()).collect()
        };
        let plain = gradients(false);
        model.parameters.tensors().iter().for_each(|t| t.shallow_clone().zero_grad());
        let again = gradients(true);
        assert!(plain.iter().zip(&again).all(|(a, b)| a == b), "{options} {architecture}");
    }
}
