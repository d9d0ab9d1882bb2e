//! A model's parameters, under the names that torch.nn would give them: `encoder.layers.0.self_attn.in_proj_weight`, …

use super::attention_heads::AttentionHeads;
use crate::error::{Error, Result};
use crate::init::Fill;
use crate::kernel::view::accumulation;
use crate::norm::spec::CLOCK;
use crate::operator::Generator;
use crate::parametrisation::{self, DeclaredAs, Part, Scaled, SumsOver};
use std::collections::{BTreeMap, HashSet};
use tch::{Device, Kind, Tensor};

/// Parameters in the order in which the model declares them. Buffers are the state that is not trained.
#[derive(Default)]
pub struct Parameters {
    names: Vec<String>,
    tensors: Vec<Tensor>,
    declared: Vec<DeclaredAs>,
    buffers: Vec<(String, Tensor)>,
    /// For each norm that keeps statistics: the number of batches whose statistics were not finite, counted on the
    /// device.
    refused: Vec<(String, Tensor)>,
    attentions: Vec<AttentionHeads>,
}

impl Parameters {
    /// Iterates over the parameters, each with its full name, in the order of their declaration.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(String::as_str).zip(&self.tensors)
    }

    /// Iterates over the parameters, each with its part in the model's parametrisation.
    pub fn parts(&self) -> impl Iterator<Item = (&str, &Tensor, Part)> {
        let declared = self.iter().zip(&self.declared);
        declared.map(|((name, t), declared)| (name, t, parametrisation::part(name, t.dim(), *declared)))
    }

    /// Iterates over running statistics and counters, each with its full name.
    pub fn buffers(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.buffers.iter().map(|(name, t)| (name.as_str(), t))
    }

    /// True if a norm keeps statistics of batches: each such norm has declared a counter in `refused`.
    pub fn have_statistics(&self) -> bool {
        !self.refused.is_empty()
    }

    /// True if a norm keeps statistics that count updates, as PowerNorm does in its buffer `iters`.
    pub fn count_updates(&self) -> bool {
        self.buffers.iter().any(|(name, _)| name.ends_with(".iters"))
    }

    /// Sets every clock t, of schemes that grow and of norms that fade, to the number of the coming update.
    pub fn set_update(&self, update: i64) -> Result<()> {
        let is_clock = |name: &str| name.rsplit('.').next() == Some(CLOCK.name);
        for (_, clock) in self.buffers().filter(|(name, _)| is_clock(name)) {
            let _ = clock.shallow_clone().f_fill_(update)?;
        }
        Ok(())
    }

    /// Returns the norms that have refused batches since the last call, with the number of batches, and resets the
    /// counts. The call copies them to the host.
    pub fn take_refused(&self) -> Result<Vec<(&str, i64)>> {
        let mut refused = Vec::new();
        for (name, count) in &self.refused {
            let batches = i64::try_from(count)?;
            if batches > 0 {
                let _ = count.shallow_clone().f_zero_()?;
                refused.push((name.as_str(), batches));
            }
        }
        Ok(refused)
    }

    /// Returns all parameters in the order of their declaration, without names.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns the heads of all attentions.
    pub fn attentions(&self) -> &[AttentionHeads] {
        &self.attentions
    }

    /// Returns the number of elements of all parameters.
    pub fn numel(&self) -> usize {
        self.tensors.iter().map(Tensor::numel).sum()
    }
}

enum Source<'a> {
    /// New parameters on this device and of this type, drawn from generators with this seed. torch's own generator is
    /// not used.
    Fresh(Device, Kind, u64),
    /// Existing tensors; if `train`, they become leaves that require gradients.
    Given { tensors: &'a BTreeMap<String, Tensor>, train: bool },
}

/// Declares parameters while a model is built.
pub struct Builder<'a> {
    source: Source<'a>,
    path: Vec<String>,
    made: Parameters,
    /// The model's parametrisation; `None` means the standard one.
    scaled: Option<Scaled>,
}

impl<'a> Builder<'a> {
    /// Builds new parameters from this seed. Each parameter draws from its own generator, seeded by the parameter's
    /// name: two models that differ in some parameters start with equal values in all others.
    pub fn fresh(seed: u64, device: Device, kind: Kind) -> Self {
        let source = Source::Fresh(device, kind, seed);
        Builder { source, path: Vec::new(), made: Parameters::default(), scaled: None }
    }

    /// Uses existing parameters as they are. [`finish`](Self::finish) refuses names that the model has not declared.
    pub fn given(tensors: &'a BTreeMap<String, Tensor>) -> Self {
        Builder {
            source: Source::Given { tensors, train: false },
            path: Vec::new(),
            made: Parameters::default(),
            scaled: None,
        }
    }

    /// Uses existing parameters, which become leaves that require gradients.
    pub fn given_to_train(tensors: &'a BTreeMap<String, Tensor>) -> Self {
        Builder {
            source: Source::Given { tensors, train: true },
            path: Vec::new(),
            made: Parameters::default(),
            scaled: None,
        }
    }

    /// Sets the parametrisation for the initial values of all parameters of norms and schemes declared after this
    /// call.
    pub fn scaled(self, scaled: Scaled) -> Self {
        Builder { scaled: Some(scaled), ..self }
    }

    /// Lets `build` declare parameters whose names begin with `name.`.
    pub fn within<T>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.path.push(name.to_string());
        let built = build(self);
        self.path.pop();
        built
    }

    /// Declares a linear layer's weight or bias, or a table. A new parameter is a leaf that requires a gradient; a
    /// given tensor is used as it is.
    pub fn parameter(&mut self, name: &str, shape: &[i64], fill: &Fill) -> Result<Tensor> {
        self.declare(name, shape, fill, DeclaredAs::Weights)
    }

    /// Declares a parameter of a norm or of a residual scheme. The parametrisation scales random initial values;
    /// `sums_over` is the dimension over which products with the parameter are summed.
    pub fn own(&mut self, name: &str, shape: &[i64], fill: &Fill, sums_over: SumsOver) -> Result<Tensor> {
        let factor = self.scaled.map_or(1.0, |scaled| scaled.drawn(sums_over));
        let fill = if let Fill::Normal { .. } = fill { fill.clone().times(factor) } else { fill.clone() };
        self.declare(name, shape, &fill, DeclaredAs::Own(sums_over))
    }

    /// Initialises a parameter or uses the given tensor of this name, and stores it with its full name.
    fn declare(&mut self, name: &str, shape: &[i64], fill: &Fill, declared: DeclaredAs) -> Result<Tensor> {
        let name = self.full(name);
        let tensor = match &self.source {
            Source::Fresh(device, kind, seed) => {
                let draw = Generator::new(named_seed(*seed, &name))?;
                made(shape, fill, *kind, *device, &draw)?.set_requires_grad(true)
            }
            Source::Given { tensors, train: false } => given(tensors, &name, shape)?,
            Source::Given { tensors, train: true } => given(tensors, &name, shape)?.detach().set_requires_grad(true),
        };
        self.made.names.push(name);
        self.made.tensors.push(tensor.shallow_clone());
        self.made.declared.push(declared);
        Ok(tensor)
    }

    /// Returns a scheme's parameter of this name if it exists already, else declares a new one. `sums_over` is the
    /// dimension over which products with the parameter are summed.
    pub fn shared(&mut self, name: &str, shape: &[i64], fill: &Fill, sums_over: SumsOver) -> Result<Tensor> {
        let full = self.full(name);
        match self.made.names.iter().position(|made| *made == full) {
            Some(index) if self.made.tensors[index].size() == shape => Ok(self.made.tensors[index].shallow_clone()),
            Some(index) => Err(Error::invalid(format!(
                "{full} is declared twice, of shape {:?} and {shape:?}: one name is one parameter",
                self.made.tensors[index].size()
            ))),
            None => self.own(name, shape, fill, sums_over),
        }
    }

    /// Declares state that is not trained and begins with `value` everywhere. Its type is `kind`, whatever the type of
    /// the parameters.
    pub fn buffer(&mut self, name: &str, shape: &[i64], value: f64, kind: Kind) -> Result<Tensor> {
        let name = self.full(name);
        let tensor = match &self.source {
            Source::Fresh(device, _, seed) => {
                // A constant draws no numbers, so any generator will do.
                made(shape, &Fill::Constant(value), kind, *device, &Generator::new(*seed)?)?
            }
            Source::Given { tensors, .. } => given(tensors, &name, shape)?,
        };
        self.made.buffers.push((name, tensor.shallow_clone()));
        Ok(tensor)
    }

    /// Declares the counter of a norm's batches whose statistics were not finite. The counter is not part of the
    /// model's state.
    pub fn refused(&mut self) -> Result<Tensor> {
        let count = self.constant(0.0)?.f_to_kind(Kind::Int64)?;
        self.made.refused.push((self.place(), count.shallow_clone()));
        Ok(count)
    }

    /// Declares an attention's heads, with their stacked projections. Returns the tensor of each head's largest logit,
    /// which begins at −∞ and is not part of the model's state.
    pub fn heads(&mut self, weight: &Tensor, bias: Option<&Tensor>, heads: i64, kv_heads: i64) -> Result<Tensor> {
        let largest = self.constant(f64::NEG_INFINITY)?.f_repeat([heads].as_slice())?;
        let (weight, bias) = (weight.shallow_clone(), bias.map(Tensor::shallow_clone));
        let name = self.place();
        self.made.attentions.push(AttentionHeads { name, weight, bias, kv_heads, largest: largest.shallow_clone() });
        Ok(largest)
    }

    /// Returns the type of running statistics: f64 for an f64 model, else f32.
    pub fn statistics_kind(&self) -> Kind {
        match &self.source {
            Source::Fresh(_, kind, _) => accumulation(*kind),
            Source::Given { tensors, .. } => {
                let is_f64 = tensors.values().any(|t| t.kind() == Kind::Double);
                if is_f64 {
                    Kind::Double
                } else {
                    Kind::Float
                }
            }
        }
    }

    /// Returns a constant of the model, (1), on the model's device and in the type of statistics.
    pub fn constant(&self, value: f64) -> Result<Tensor> {
        let device = match &self.source {
            Source::Fresh(device, ..) => *device,
            Source::Given { tensors, .. } => tensors.values().next().map_or(Device::Cpu, Tensor::device),
        };
        Ok(Tensor::f_full([1i64].as_slice(), value, (self.statistics_kind(), device))?)
    }

    /// Returns the name of the module whose parameters are being declared.
    pub fn place(&self) -> String {
        self.path.join(".")
    }

    /// Returns the full name of a parameter of the module that is being declared.
    fn full(&self, name: &str) -> String {
        self.path.iter().map(String::as_str).chain([name]).collect::<Vec<_>>().join(".")
    }

    /// Returns everything that was declared. Errors if tensors were given that the model has not declared.
    pub fn finish(self) -> Result<Parameters> {
        if let Source::Given { tensors, .. } = self.source {
            let known: HashSet<&str> = self.made.iter().chain(self.made.buffers()).map(|(name, _)| name).collect();
            let mut extra: Vec<&str> = tensors.keys().map(String::as_str).filter(|k| !known.contains(k)).collect();
            if !extra.is_empty() {
                extra.sort_unstable();
                return Err(Error::invalid(format!(
                    "the given weights have {} that this model lacks: {}",
                    extra.len(),
                    extra[..extra.len().min(8)].join(", ")
                )));
            }
        }
        Ok(self.made)
    }
}

/// Returns the seed of a parameter's generator: an FNV-1a hash of the name that starts from the model's seed. Then
/// SplitMix64 mixes the bits, because the generator uses only the lower 32.
fn named_seed(seed: u64, name: &str) -> u64 {
    // The constants are those of FNV-1a (offset and prime) and of SplitMix64 (the other three).
    let start = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = name.bytes().fold(start, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let mixed = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns a new tensor of this type on this device, with initial values that `fill` draws from `draw`.
fn made(shape: &[i64], fill: &Fill, kind: Kind, device: Device, draw: &Generator) -> Result<Tensor> {
    // Values are drawn on the CPU and at least in f32. So a seed gives the same model on every device and in every
    // type.
    let is_counter = kind == Kind::Int64;
    let t = Tensor::f_empty(shape, (if is_counter { kind } else { accumulation(kind) }, Device::Cpu))?;
    fill.write(&t, draw)?;
    Ok(t.f_to_kind(kind)?.f_to_device(device)?)
}

/// Returns the given tensor of this name; errors if there is none or if it has another shape.
fn given(tensors: &BTreeMap<String, Tensor>, name: &str, shape: &[i64]) -> Result<Tensor> {
    let t = tensors.get(name).ok_or_else(|| {
        Error::invalid(format!("the model has {name} of shape {shape:?}, and the given weights have none of that name"))
    })?;
    if t.size() != shape {
        return Err(Error::invalid(format!(
            "{name} must have shape {shape:?}, the given one has {:?}: another model's weights?",
            t.size()
        )));
    }
    Ok(t.shallow_clone())
}
