//! What a norm declares, and how a model is given what was declared.

use super::composed::{Composed, Hat};
use super::kernels::{ColumnKernels, RowKernels};
use super::{running, Norm, Rows, Rowwise, Site};
use crate::config::TransformerConfig;
use crate::error::Result;
use crate::init::Fill;
use crate::model::Builder;
use crate::operator::RowOperator;
use serde_json::{json, Value};
use tch::{Kind, Tensor};

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
    pub buffers: &'static [Buffer],
    pub options: &'static [Setting],
    pub form: Form,
}

/// How x̂ is computed.
#[derive(Clone, Copy)]
pub enum Form {
    /// Row by row, by the composed form.
    Composed(Hat),
    /// Row by row, by kernels; the fused residual step has them, too.
    Rows(&'static RowKernels),
    /// Row by row, by an operator of its own: (x, weight, options) → y.
    Operator(fn(&Tensor, Option<&Tensor>, &[f64]) -> Result<Tensor>),
    /// One of the above, by the options.
    Chosen(fn(&[f64]) -> Form),
    /// By statistics of columns.
    Columns(&'static ColumnKernels),
}

/// The shape of a parameter or a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// (1,)
    One,
    /// (d,)
    Width,
    /// (1, d, 1, 1), as PowerNorm's authors store it.
    Column,
}

impl Shape {
    fn of(self, width: i64) -> Vec<i64> {
        match self {
            Shape::One => vec![1],
            Shape::Width => vec![width],
            Shape::Column => vec![1, width, 1, 1],
        }
    }

    fn name(self) -> &'static str {
        match self {
            Shape::One => "one",
            Shape::Width => "width",
            Shape::Column => "column",
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
    pub shape: Shape,
    pub start: Start,
}

/// γ = 1 per column.
pub const WEIGHT: Parameter = Parameter { name: "weight", shape: Shape::Width, start: Start::Is(1.0) };
/// β = 0 per column.
pub const BIAS: Parameter = Parameter { name: "bias", shape: Shape::Width, start: Start::Is(0.0) };
/// One g for all columns, such that y has x's length on average.
pub const GAIN: Parameter = Parameter { name: "weight", shape: Shape::One, start: Start::Length };

impl Parameter {
    /// One number that enters x̂.
    pub const fn one(name: &'static str, start: f64) -> Self {
        Parameter { name, shape: Shape::One, start: Start::Is(start) }
    }

    /// It stands outside x̂.
    pub(super) fn is_affine(&self) -> bool {
        matches!(self.name, "weight" | "bias")
    }
}

/// State that training moves without a gradient, in f32 or f64; a counter is int64.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    pub name: &'static str,
    pub shape: Shape,
    pub start: f64,
    pub is_counter: bool,
}

impl Buffer {
    /// A running statistic.
    pub const fn new(name: &'static str, shape: Shape, start: f64) -> Self {
        Buffer { name, shape, start, is_counter: false }
    }
}

/// An option: a keyword of the module, and what a model's configuration makes of it.
pub struct Setting {
    pub keyword: &'static str,
    /// The option of [`TransformerConfig`] that a user gives; empty: none.
    pub option: &'static str,
    pub value: Read,
}

/// An option's value at a site.
#[derive(Clone, Copy)]
pub enum Read {
    Number(fn(&Site) -> f64),
    Count(fn(&Site) -> i64),
    Flag(fn(&Site) -> bool),
    Word(fn(&Site) -> &'static str),
}

/// ε = 1e-5.
pub const EPS: Setting =
    Setting { keyword: "eps", option: "norm_eps", value: Read::Number(|site| site.config.norm_eps.unwrap_or(1e-5)) };

macro_rules! readers {
    ($($name:ident: $kind:ident -> $value:ty),+) => {
        $(
            /// The option of this keyword at a site; none: the norm has no such option.
            pub(super) fn $name(&self, keyword: &str, site: &Site) -> Option<$value> {
                match self.options.iter().find(|option| option.keyword == keyword)?.value {
                    Read::$kind(value) => Some(value(site)),
                    _ => None,
                }
            }
        )+
    };
}

impl Spec {
    /// Its rows touch each other, by statistics of the batch.
    pub fn has_statistics(&self) -> bool {
        matches!(self.form, Form::Columns(_))
    }

    /// Declares the parameters and makes the norm.
    pub fn build(&self, b: &mut Builder, site: &Site) -> Result<Box<dyn Norm>> {
        let (mut inside, mut weight, mut bias) = (Vec::new(), None, None);
        for parameter in self.parameters {
            let made = self.parameter(parameter, b, site)?;
            match (parameter.name, made) {
                ("weight", made) => weight = made,
                ("bias", made) => bias = made,
                (_, made) => inside.extend(made),
            }
        }
        let options = self.numbers(site);
        let form = match self.form {
            Form::Chosen(choose) => choose(&options),
            form => form,
        };
        Ok(match form {
            Form::Composed(hat) => Box::new(Composed { hat, inside, weight, bias, options }),
            Form::Rows(kernels) => {
                let (operator, eps) = (RowOperator::of(kernels), self.number("eps", site).unwrap_or(0.0));
                Box::new(Rowwise { operator, weight, bias, eps })
            }
            Form::Operator(call) => Box::new(Called { call, weight, options }),
            Form::Columns(kernels) => running::build(self, kernels, weight, bias, b, site)?,
            Form::Chosen(_) => unreachable!("options choose a form that is computed"),
        })
    }

    /// None: the norm goes without it.
    fn parameter(&self, parameter: &Parameter, b: &mut Builder, site: &Site) -> Result<Option<Tensor>> {
        let start = match parameter.start {
            Start::Is(value) => value,
            Start::Length => match self.number("p", site) {
                Some(p) => (site.width as f64).powf(1.0 / p),
                None => (site.width as f64).sqrt(),
            },
        };
        let is_learned = !parameter.is_affine() || self.flag("elementwise_affine", site).unwrap_or(true);
        Ok(match (is_learned, parameter.shape) {
            (true, shape) => Some(b.parameter(parameter.name, &shape.of(site.width), &Fill::Constant(start))?),
            (false, Shape::One) => Some(b.constant(start)?),
            (false, _) => None,
        })
    }

    /// The buffers, in order.
    pub(super) fn buffers(&self, b: &mut Builder, site: &Site) -> Result<Vec<Tensor>> {
        let buffer = |buffer: &Buffer| {
            let kind = if buffer.is_counter { Kind::Int64 } else { b.statistics_kind() };
            b.buffer(buffer.name, &buffer.shape.of(site.width), buffer.start, kind)
        };
        self.buffers.iter().map(buffer).collect()
    }

    readers! { number: Number -> f64, count: Count -> i64, flag: Flag -> bool, word: Word -> &'static str }

    /// Options that are numbers, in order: what the composed form is given.
    fn numbers(&self, site: &Site) -> Vec<f64> {
        self.options.iter().filter_map(|option| self.number(option.keyword, site)).collect()
    }

    /// How many numbers the composed form is given.
    pub(super) fn count_of_numbers(&self) -> usize {
        self.options.iter().filter(|option| matches!(option.value, Read::Number(_))).count()
    }

    /// The module's keyword arguments at a site, as JSON; infinity is the word "inf".
    pub fn settings(&self, site: &Site) -> Value {
        let value = |read: &Read| match read {
            Read::Number(value) if value(site).is_infinite() => json!("inf"),
            Read::Number(value) => json!(value(site)),
            Read::Count(value) => json!(value(site)),
            Read::Flag(value) => json!(value(site)),
            Read::Word(value) => json!(value(site)),
        };
        self.options.iter().map(|option| (option.keyword.to_string(), value(&option.value))).collect()
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
        let kind = |read: &Read| match read {
            Read::Number(_) => "float",
            Read::Count(_) => "int",
            Read::Flag(_) => "bool",
            Read::Word(_) => "str",
        };
        let config = TransformerConfig::default();
        let first = Site { width: config.d_model, config: &config, last_of_decoder: false, ends_stack: false };
        let defaults = self.settings(&first);
        let option = |o: &Setting| json!({"name": o.keyword, "kind": kind(&o.value), "default": defaults[o.keyword]});
        let buffer =
            |b: &Buffer| json!({"name": b.name, "shape": b.shape.name(), "start": b.start, "is_counter": b.is_counter});
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

/// A norm by an operator of its own.
struct Called {
    call: fn(&Tensor, Option<&Tensor>, &[f64]) -> Result<Tensor>,
    weight: Option<Tensor>,
    options: Vec<f64>,
}

impl Norm for Called {
    fn forward(&self, x: &Tensor, _: &Rows) -> Result<Tensor> {
        (self.call)(x, self.weight.as_ref(), &self.options)
    }
}
