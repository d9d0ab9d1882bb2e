//! What a norm declares.

use super::composed::{self, Hat};
use super::kernels::{ColumnKernels, RowKernels};
use crate::error::{Error, Result};
use crate::options::{setting, Listed, Options};
use serde_json::{json, Value};
use tch::Tensor;

/// A norm: y = weight⊙x̂ + bias, and how x̂ is made. The training loop, Python's modules, the command line and the
/// documentation read this entry, so it is all that a norm has to say.
pub struct Spec {
    /// The name users give.
    pub name: &'static str,
    /// The name of its class in `normformer_rs.nn`.
    pub module: &'static str,
    pub equation: &'static str,
    pub source: &'static str,
    /// What it learns: `weight` and `bias`, if it has them; every other parameter enters x̂.
    pub parameters: &'static [Parameter],
    /// Running statistics.
    pub buffers: &'static [StateBuffer],
    pub options: &'static [Keyword],
    pub form: Form,
}

/// How x̂ is computed.
#[derive(Clone, Copy)]
pub enum Form {
    /// Row by row, by the composed form.
    Composed(Hat),
    /// Row by row, by kernels; the fused residual step has them, too.
    Rows(&'static RowKernels),
    /// Row by row, by the operator of that name: (x, weight, options) → y.
    Operator(&'static str),
    /// One of the above, by the options.
    Chosen(fn(&[f64]) -> Form),
    /// By statistics of columns.
    Columns(&'static ColumnKernels),
}

/// The shape of a parameter or a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredShape {
    /// (1,)
    One,
    /// (d,)
    Width,
    /// (1, d, 1, 1), as PowerNorm's authors store it.
    Column,
}

impl DeclaredShape {
    /// In a norm of that width.
    pub fn of(self, width: i64) -> Vec<i64> {
        match self {
            DeclaredShape::One => vec![1],
            DeclaredShape::Width => vec![width],
            DeclaredShape::Column => vec![1, width, 1, 1],
        }
    }

    fn name(self) -> &'static str {
        match self {
            DeclaredShape::One => "one",
            DeclaredShape::Width => "width",
            DeclaredShape::Column => "column",
        }
    }
}

/// What every number of a parameter is at the start.
#[derive(Clone, Copy, Debug)]
pub enum Start {
    Is(f64),
    /// ‖(1, …, 1)‖_p = d^{1/p}: the length of a row of ones. p is the option of that name, or 2.
    Length,
}

/// A learned tensor.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    pub name: &'static str,
    pub shape: DeclaredShape,
    pub start: Start,
}

/// γ = 1 per column.
pub const WEIGHT: Parameter = Parameter { name: "weight", shape: DeclaredShape::Width, start: Start::Is(1.0) };
/// β = 0 per column.
pub const BIAS: Parameter = Parameter { name: "bias", shape: DeclaredShape::Width, start: Start::Is(0.0) };
/// One g for all columns, such that y has x's length on average.
pub const GAIN: Parameter = Parameter { name: "weight", shape: DeclaredShape::One, start: Start::Length };

impl Parameter {
    /// One number that enters x̂.
    pub const fn one(name: &'static str, start: f64) -> Self {
        Parameter { name, shape: DeclaredShape::One, start: Start::Is(start) }
    }

    /// It stands outside x̂.
    pub fn is_affine(&self) -> bool {
        matches!(self.name, "weight" | "bias")
    }
}

/// State that training moves without a gradient, in f32 or f64; a counter is int64.
#[derive(Clone, Copy, Debug)]
pub struct StateBuffer {
    pub name: &'static str,
    pub shape: DeclaredShape,
    pub start: f64,
    pub is_counter: bool,
}

impl StateBuffer {
    /// A running statistic.
    pub const fn new(name: &'static str, shape: DeclaredShape, start: f64) -> Self {
        StateBuffer { name, shape, start, is_counter: false }
    }
}

/// Where a norm stands in a model, for those that care.
#[derive(Clone, Copy, Debug)]
pub struct Site<'a> {
    /// Numbers per row.
    pub width: i64,
    /// The model's attention heads.
    pub heads: i64,
    /// What the model's configuration says of the tables' options.
    pub options: &'a Options,
    /// The last norm of the decoder, whose gain `scalenorm-fixed` learns (Nguyen & Salazar 2019, Table 7).
    pub last_of_decoder: bool,
    /// It stands after a stack's last layer.
    pub ends_stack: bool,
    /// What its weight's first value is multiplied by.
    pub start: f64,
}

/// A keyword of the norm's module, and what it is in a model: what the configuration says, or what its place asks for.
#[derive(Clone, Copy)]
pub struct Keyword {
    pub name: &'static str,
    /// What a user gives; none: nothing.
    pub option: Option<&'static dyn Listed>,
    /// The value at a place, where that is not the option's: a float, an integer, a bool or a string.
    pub at: Option<fn(&Site) -> Value>,
}

impl Keyword {
    /// The option, under the module's name for it.
    pub const fn of(name: &'static str, option: &'static dyn Listed) -> Self {
        Keyword { name, option: Some(option), at: None }
    }

    /// The value at a place, with or without an option that has a say in it.
    pub const fn at(name: &'static str, option: Option<&'static dyn Listed>, at: fn(&Site) -> Value) -> Self {
        Keyword { name, option, at: Some(at) }
    }

    fn value(&self, site: &Site) -> Value {
        match (self.at, self.option) {
            (Some(at), _) => at(site),
            (None, Some(option)) => site.options.value(option),
            (None, None) => unreachable!("`of` and `at` give one of them"),
        }
    }
}

setting! {
    /// The norm's epsilon; none: the norm's own default.
    pub NORM_EPS ("norm_eps"): Option<f64> = None, |name, eps| match eps {
        Some(eps) if !(eps >= 0.0 && eps.is_finite()) => {
            Err(Error::invalid(format!("{name} must be at least 0, got {eps}")))
        }
        _ => Ok(()),
    };
}

/// ε, 1e-5 where nothing is said.
pub const EPS: Keyword = Keyword::at("eps", Some(&NORM_EPS), |site| site.options.get(&NORM_EPS).unwrap_or(1e-5).into());

/// Statistics over all ranks, where there are several.
pub const SYNC: Keyword = Keyword::at("sync", None, |_| true.into());

impl Spec {
    /// Its rows touch each other, by statistics of the batch.
    pub fn has_statistics(&self) -> bool {
        matches!(self.form, Form::Columns(_))
    }

    /// Its weight is a parameter wherever it stands in a model with these options.
    pub fn learns_weight(&self, options: &Options) -> bool {
        let has_weight = self.parameters.iter().any(|parameter| parameter.name == WEIGHT.name);
        let site = Site { options, ..Site::ANY };
        has_weight && self.value("elementwise_affine", &site).is_none_or(|flag| flag == true)
    }

    /// The keyword's value at a site; none: the norm has no such keyword.
    pub fn value(&self, keyword: &str, site: &Site) -> Option<Value> {
        Some(self.options.iter().find(|option| option.name == keyword)?.value(site))
    }

    pub fn number(&self, keyword: &str, site: &Site) -> Option<f64> {
        self.value(keyword, site).as_ref().and_then(number)
    }

    /// Options that are numbers, in order: what the composed form is given.
    pub fn numbers(&self, site: &Site) -> Vec<f64> {
        self.options.iter().filter_map(|option| number(&option.value(site))).collect()
    }

    /// y of a norm that must be its composed form alone, or a curve. `parameters` and `options` as it declares them.
    pub fn composed(&self, x: &Tensor, parameters: Vec<Option<Tensor>>, options: &[f64]) -> Result<Tensor> {
        let name = self.name;
        let hat = match self.form {
            Form::Composed(hat) => hat,
            Form::Rows(RowKernels { hat, numbers, .. }) if !numbers.is_empty() => *hat,
            _ => return Err(Error::invalid(format!("{name} has an operator of its own: call that"))),
        };
        let wanted = (self.parameters.len(), self.numbers(&Site::ANY).len());
        let got = (parameters.len(), options.len());
        if wanted != got {
            return Err(Error::invalid(format!(
                "{name} takes {} parameters and {} options, got {} and {}",
                wanted.0, wanted.1, got.0, got.1
            )));
        }
        let (mut inside, mut weight, mut bias) = (Vec::new(), None, None);
        for (declared, given) in self.parameters.iter().zip(parameters) {
            match (declared.name, given) {
                ("weight", given) => weight = given,
                ("bias", given) => bias = given,
                (_, Some(given)) => inside.push(given),
                (absent, None) => return Err(Error::invalid(format!("{name} needs its parameter {absent}, got none"))),
            }
        }
        composed::apply(hat, x, &inside, (weight.as_ref(), bias.as_ref()), options)
    }

    /// The module's keyword arguments at a site, as JSON; infinity is the word "inf".
    pub fn settings(&self, site: &Site) -> Value {
        self.options.iter().map(|option| (option.name.to_string(), option.value(site))).collect()
    }

    /// The entry, as JSON: what Python makes the module of.
    pub fn describe(&self) -> Value {
        let parameter = |p: &Parameter| {
            let start = match p.start {
                Start::Is(value) => json!(value),
                Start::Length => json!("length"),
            };
            json!({"name": p.name, "shape": p.shape.name(), "start": start})
        };
        let option = |option: &Keyword| {
            let default = option.value(&Site::ANY);
            let kind = match &default {
                Value::Bool(_) => "bool",
                Value::String(_) => "str",
                Value::Number(n) if n.is_i64() => "int",
                _ => "float",
            };
            json!({"name": option.name, "kind": kind, "default": default})
        };
        let buffer = |b: &StateBuffer| json!({"name": b.name, "shape": b.shape.name(), "start": b.start, "is_counter": b.is_counter});
        let (form, operator) = match self.form {
            Form::Composed(_) => ("composed", None),
            Form::Rows(kernels) => ("rows", Some(kernels.operator)),
            Form::Columns(kernels) => ("columns", Some(kernels.operator)),
            Form::Chosen(_) | Form::Operator(_) => ("chosen", None),
        };
        json!({
            "name": self.name,
            "equation": self.equation,
            "source": self.source,
            "module": self.module,
            "operator": operator,
            "form": form,
            "parameters": self.parameters.iter().map(parameter).collect::<Vec<_>>(),
            "buffers": self.buffers.iter().map(buffer).collect::<Vec<_>>(),
            "options": self.options.iter().map(option).collect::<Vec<_>>(),
        })
    }
}

impl Site<'_> {
    /// In a model of which nothing was said.
    pub const ANY: Site<'static> =
        Site { width: 1, heads: 1, options: &Options::NONE, last_of_decoder: false, ends_stack: false, start: 1.0 };
}

fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) if n.is_f64() => n.as_f64(),
        Value::String(word) if word == "inf" => Some(f64::INFINITY),
        _ => None,
    }
}
