//! The declaration of a norm.

use super::composed::{self, accumulate, ComposedNorm, WholeNorm};
use super::operators::{BlendedNormOpSpec, ColumnNormOpSpec, CompositeNormOpSpec, OwnNorm, RowNormOpSpec};
use crate::error::{Error, Result};
use crate::options::{option_spec, AnyOption, Options};
use crate::parametrisation::SumsOver;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use tch::Tensor;

/// A norm y = weight⊙x̂ + bias, and how x̂ is computed. The training loop, Python's modules, the command line and the
/// documentation are all built from this entry.
pub struct Spec {
    /// The name by which users choose the norm.
    pub name: &'static str,
    /// The name of the norm's class in `normformer_rs.nn`.
    pub module: &'static str,
    /// The equation and the paper or code that defines it, as texts for the documentation.
    pub equation: &'static str,
    pub source: &'static str,
    /// The learned parameters. Those named `weight` and `bias` are applied to x̂; all others are used to compute x̂.
    pub parameters: &'static [Parameter],
    /// The running statistics that the norm keeps.
    pub buffers: &'static [StateBuffer],
    pub options: &'static [NormOption],
    pub form: Form,
}

impl Spec {
    /// True if the norm's form stores the running statistics that the norm declares.
    pub const fn keeps_its_buffers(&self) -> bool {
        self.buffers.is_empty() || matches!(self.form, Form::Columns(_) | Form::Blended(_))
    }
}

/// The way in which x̂ is computed.
#[derive(Clone, Copy)]
pub enum Form {
    /// The composed form computes x̂ row by row. This is for norms without kernels, as in CONTRIBUTING.md's example.
    #[allow(dead_code)]
    Composed(ComposedNorm),
    /// A composed formula computes y, not x̂, from x and all parameters, weight included.
    Whole(WholeNorm),
    /// Kernels compute x̂ row by row. The fused residual step uses the same kernels.
    Rows(&'static RowNormOpSpec),
    /// An operator that only this norm has computes y row by row.
    Operator(&'static CompositeNormOpSpec),
    /// The function chooses another form by the norm's options. The first field is the form shown in tables.
    Chosen(&'static Form, fn(&NormArgs) -> Result<Form>),
    /// x̂ uses statistics of columns, measured over all rows of a batch.
    Columns(&'static ColumnNormOpSpec),
    /// y uses statistics of columns, adds a learned share of x, and may be mixed with a norm of rows in training.
    Blended(&'static BlendedNormOpSpec),
    /// A function that a user declares computes y row by row.
    Own(&'static OwnNorm),
}

/// The shape of a parameter or a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeclaredShape {
    /// The shape (1,).
    One,
    /// The shape (d,).
    Width,
    /// The shape (1, d, 1, 1), which PowerNorm's authors use.
    Column,
    /// A matrix with these numbers of rows and columns.
    Matrix([Size; 2]),
}

/// The number of rows or columns of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    Is(i64),
    Width,
    /// The value of the norm's option with this name.
    By(&'static str),
}

impl DeclaredShape {
    /// Returns the sizes of this shape, for a norm with this width and these options.
    pub fn of(self, given: &NormArgs) -> Vec<i64> {
        match self {
            DeclaredShape::One => vec![1],
            DeclaredShape::Width => vec![given.width],
            DeclaredShape::Column => vec![1, given.width, 1, 1],
            DeclaredShape::Matrix(sides) => sides.map(|side| side.of(given)).to_vec(),
        }
    }

    /// Returns the name of the shape; for a matrix its two sides, each a number, "width" or the name of an option.
    fn describe(self) -> Value {
        match self {
            DeclaredShape::One => "one".into(),
            DeclaredShape::Width => "width".into(),
            DeclaredShape::Column => "column".into(),
            DeclaredShape::Matrix(sides) => sides.iter().map(|side| side.describe()).collect(),
        }
    }
}

impl Size {
    /// Returns the number of rows or columns, for a norm with this width and these options.
    fn of(self, given: &NormArgs) -> i64 {
        match self {
            Size::Is(number) => number,
            Size::Width => given.width,
            Size::By(option) => given.float(option) as i64,
        }
    }

    /// Returns the number, "width", or the name of the option.
    fn describe(self) -> Value {
        match self {
            Size::Is(number) => number.into(),
            Size::Width => "width".into(),
            Size::By(option) => option.into(),
        }
    }
}

/// A number that belongs to a parameter and may depend on the norm's width d and options.
#[derive(Clone, Copy)]
pub enum Quantity {
    Is(f64),
    /// A formula in words, and the function that computes it.
    By(&'static str, fn(&NormArgs) -> f64),
    /// The value for each width.
    ByWidth(&'static BTreeMap<i64, f64>),
}

impl Quantity {
    /// Returns the number for a norm with these arguments; NaN if it is not declared for the norm's width.
    fn at(self, given: &NormArgs) -> f64 {
        match self {
            Quantity::Is(value) => value,
            Quantity::By(_, rule) => rule(given),
            Quantity::ByWidth(values) => values.get(&given.width).copied().unwrap_or(f64::NAN),
        }
    }

    /// Returns the number, or the formula in words.
    fn describe(self) -> Value {
        match self {
            Quantity::Is(value) => value.into(),
            Quantity::By(words, _) => words.into(),
            Quantity::ByWidth(values) => json!(values),
        }
    }
}

/// A learned tensor p. Kernels and formulas receive factor·(offset + p).
#[derive(Clone, Copy)]
pub struct Parameter {
    pub name: &'static str,
    pub shape: DeclaredShape,
    /// The initial value of every element of p; if `std` is not 0, the mean of the initial values.
    pub start: Quantity,
    /// The standard deviation of the initial values, which are normally distributed; 0 means that all are equal to
    /// `start`.
    pub std: Quantity,
    pub offset: Quantity,
    pub factor: Quantity,
    /// The dimension over which products with the parameter are summed. Parametrisations scale its learning rate
    /// accordingly.
    pub sums_over: SumsOver,
    /// True if the parameter is a gain. A residual scheme may multiply a norm's initial gain by a factor.
    pub is_gain: bool,
    /// True if a norm with these options has the parameter.
    pub is_present: fn(&NormArgs) -> bool,
}

/// The gain γ, one number per column, initially 1.
pub const WEIGHT: Parameter = Parameter::new("weight", DeclaredShape::Width, 1.0).gain();
/// The bias β, one number per column, initially 0.
pub const BIAS: Parameter = Parameter::new("bias", DeclaredShape::Width, 0.0);
/// One gain g for all columns. It begins at √d, so that y has the length of x on average.
pub const GAIN: Parameter = Parameter {
    start: Quantity::By("√d", |given| (given.width as f64).sqrt()),
    ..Parameter::new("weight", DeclaredShape::One, 1.0).gain()
};

impl Parameter {
    /// Declares a parameter whose elements all begin at `start` and which kernels receive as p itself.
    pub const fn new(name: &'static str, shape: DeclaredShape, start: f64) -> Self {
        let (zero, sums_over) = (Quantity::Is(0.0), SumsOver::Nothing);
        Parameter {
            name,
            shape,
            start: Quantity::Is(start),
            std: zero,
            offset: zero,
            factor: Quantity::Is(1.0),
            sums_over,
            is_gain: false,
            is_present: |_| true,
        }
    }

    /// Declares that the parameter is a gain, a factor of y; see [`Parameter::is_gain`].
    pub const fn gain(self) -> Self {
        Parameter { is_gain: true, ..self }
    }

    /// Declares a matrix used inside x̂, with initial values from N(0, std²). `sides` are the numbers of its rows and
    /// columns; products are summed over the columns.
    pub const fn matrix(name: &'static str, sides: [Size; 2], std: f64) -> Self {
        let sums_over = if matches!(sides[1], Size::Width) { SumsOver::Width } else { SumsOver::Nothing };
        Parameter { std: Quantity::Is(std), sums_over, ..Parameter::new(name, DeclaredShape::Matrix(sides), 0.0) }
    }

    /// Declares a single number used inside x̂.
    pub const fn one(name: &'static str, start: f64) -> Self {
        Parameter::new(name, DeclaredShape::One, start)
    }

    /// True if the parameter is applied to x̂: the weight or the bias.
    pub fn is_affine(&self) -> bool {
        matches!(self.name, "weight" | "bias")
    }

    /// Returns the parameter's numbers for a norm with this width and these options.
    pub fn numbers(&self, given: &NormArgs) -> Numbers {
        let [start, std, offset, factor] = [self.start, self.std, self.offset, self.factor].map(|q| q.at(given));
        Numbers { start, std, offset, factor }
    }
}

/// The values of a parameter's [`Quantity`]s in one norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    pub start: f64,
    pub std: f64,
    pub offset: f64,
    pub factor: f64,
}

impl Numbers {
    /// True if factor·(offset + p) is p, so that kernels receive p itself.
    pub fn are_plain(&self) -> bool {
        (self.offset, self.factor) == (0.0, 1.0)
    }

    /// Returns the initial value of p for which factor·(offset + p) is `scale` times its usual initial value.
    pub fn first(&self, scale: f64) -> f64 {
        match scale == 1.0 {
            true => self.start,
            false => (self.offset + self.start) * scale - self.offset,
        }
    }

    /// Returns factor·(offset + p), in f32 or f64 unless it is p itself. A sum in 16 bits would lose small values of p.
    pub fn of(&self, p: &Tensor) -> Result<Tensor> {
        if self.are_plain() {
            return Ok(p.shallow_clone());
        }
        let wide = accumulate(p)?;
        let sum = if self.offset == 0.0 { wide } else { wide.f_add_scalar(self.offset)? };
        Ok(if self.factor == 1.0 { sum } else { sum.f_mul_scalar(self.factor)? })
    }

    /// Returns factor·(offset + p) with the initial value of p.
    pub fn at_start(&self) -> f64 {
        self.factor * (self.offset + self.start)
    }
}

/// A state that training updates without a gradient. Its type is f32 or f64, or int64 if it is a counter.
#[derive(Clone, Copy, Debug)]
pub struct StateBuffer {
    pub name: &'static str,
    pub shape: DeclaredShape,
    /// The initial value of every element.
    pub start: f64,
    pub is_counter: bool,
}

/// The number t of the coming update, counted from 1. The code that makes updates sets this buffer, not forward passes.
pub const CLOCK: StateBuffer = StateBuffer { is_counter: true, ..StateBuffer::new("t", DeclaredShape::One, 1.0) };

impl StateBuffer {
    /// Declares a running statistic.
    pub const fn new(name: &'static str, shape: DeclaredShape, start: f64) -> Self {
        StateBuffer { name, shape, start, is_counter: false }
    }
}

/// The place of a norm in a model, for options that depend on the place.
#[derive(Clone, Copy, Debug)]
pub struct NormContext<'a> {
    /// The width of the norm's input rows.
    pub width: i64,
    /// The number of the model's attention heads.
    pub heads: i64,
    /// The values of options in the model's configuration.
    pub options: &'a Options,
    /// True for the last norm of the decoder. The norm `scalenorm-fixed` learns its gain only there (Nguyen & Salazar
    /// 2019, Table 7).
    pub last_of_decoder: bool,
    /// True if the norm comes after a stack's last layer.
    pub ends_stack: bool,
    /// The factor by which the initial gain is multiplied.
    pub start: f64,
}

/// A norm's width, and the keyword arguments of its module.
#[derive(Debug)]
pub struct NormArgs {
    pub width: i64,
    values: Map<String, Value>,
}

impl NormArgs {
    /// Returns the arguments of a norm whose only argument is ε; row kernels need no others. The width 1 stands for any
    /// width.
    pub(super) fn of_eps(eps: f64) -> Self {
        NormArgs { width: 1, values: Map::from_iter([("eps".to_string(), eps.into())]) }
    }

    /// Returns a keyword argument; `None` if the norm does not have the keyword.
    pub fn value(&self, keyword: &str) -> Option<&Value> {
        self.values.get(keyword)
    }

    /// Returns a keyword argument as a number; `None` if the norm does not have the keyword.
    pub fn number(&self, keyword: &str) -> Option<f64> {
        self.value(keyword).map(number)
    }

    /// True if a keyword argument is this word.
    pub fn is(&self, keyword: &str, word: &str) -> bool {
        self.value(keyword).is_some_and(|value| value == word)
    }

    /// True if a keyword argument is true.
    pub fn flag(&self, keyword: &str) -> bool {
        self.value(keyword).is_some_and(|value| value == true)
    }

    /// Returns a keyword argument as a number; panics if the norm does not declare it.
    pub fn float(&self, keyword: &str) -> f64 {
        self.number(keyword).unwrap_or_else(|| panic!("the norm declares no keyword {keyword}"))
    }
}

/// Converts a JSON value to a number. JSON has no infinity, so the text "inf" stands for it; other values become NaN.
fn number(value: &Value) -> f64 {
    match value.as_f64() {
        Some(number) => number,
        None if value == "inf" => f64::INFINITY,
        None => f64::NAN,
    }
}

/// A keyword argument of a norm's module, and the source of its value in a model: an option of the configuration, or
/// the norm's place.
#[derive(Clone, Copy)]
pub struct NormOption {
    pub name: &'static str,
    /// The option of the configuration that sets the argument; `None` if no option does.
    pub option: Option<&'static dyn AnyOption>,
    /// Returns the value at a place: a float, an integer, a bool or a string. `None` means the value of `option`.
    pub at: Option<fn(&NormContext) -> Value>,
}

impl NormOption {
    /// Declares a keyword argument whose value is the value of an option.
    pub const fn of(name: &'static str, option: &'static dyn AnyOption) -> Self {
        NormOption { name, option: Some(option), at: None }
    }

    /// Declares a keyword argument whose value depends on the norm's place, and perhaps on an option.
    pub const fn at(name: &'static str, option: Option<&'static dyn AnyOption>, at: fn(&NormContext) -> Value) -> Self {
        NormOption { name, option, at: Some(at) }
    }

    /// Returns the argument's value at a place of a model.
    fn value(&self, context: &NormContext) -> Value {
        match (self.at, self.option) {
            (Some(at), _) => at(context),
            (None, Some(option)) => context.options.value(option),
            (None, None) => unreachable!("`of` and `at` give one of them"),
        }
    }

    /// Returns the words that the option accepts; empty if its values are not words.
    fn choices(&self) -> Vec<&'static str> {
        // `field` takes a heading of --help, which does not matter here.
        self.option.map_or_else(Vec::new, |option| option.field("").choices)
    }

    /// Returns a module's value for this argument, after a check if an option alone sets the argument.
    fn read(&self, value: Value) -> Result<Value> {
        match (self.at, self.option) {
            (None, Some(option)) => option.accept(self.name, value),
            _ => Ok(value),
        }
    }

    /// Converts a number that an operator receives to the argument's value. Operators receive a flag as 0 or 1, and a
    /// word as its index among the choices.
    fn decode(&self, number: f64) -> Value {
        // The argument's default value shows its type.
        match self.value(&NormContext::ANY) {
            Value::Bool(_) => (number != 0.0).into(),
            Value::Number(n) if n.is_i64() => (number as i64).into(),
            Value::Number(_) if number.is_infinite() => "inf".into(),
            Value::String(_) => self.choices().get(number as usize).copied().into(),
            _ => number.into(),
        }
    }
}

option_spec! {
    /// The norm's epsilon (default: the norm's own).
    pub NORM_EPS ("norm_eps"): Option<f64> = None, |name, eps| match eps {
        Some(eps) if !(eps >= 0.0 && eps.is_finite()) => {
            Err(Error::invalid(format!("{name} must be at least 0, got {eps}")))
        }
        _ => Ok(()),
    };
}

/// The keyword argument ε, 1e-5 by default.
pub const EPS: NormOption =
    NormOption::at("eps", Some(&NORM_EPS), |context| context.options.get(&NORM_EPS).unwrap_or(1e-5).into());

/// The keyword argument that says whether statistics are computed over all ranks.
pub const SYNC: NormOption = NormOption::at("sync", None, |_| true.into());

impl Spec {
    /// True if rows affect each other, because the norm uses statistics of the batch.
    pub fn has_statistics(&self) -> bool {
        matches!(self.form, Form::Columns(_) | Form::Blended(_))
    }

    /// True if the weight is a learned parameter at every place of a model with these options.
    pub fn learns_weight(&self, options: &Options) -> bool {
        let has_weight = self.parameters.iter().any(|parameter| parameter.name == WEIGHT.name);
        let context = NormContext { options, ..NormContext::ANY };
        has_weight && self.value("elementwise_affine", &context).is_none_or(|flag| flag == true)
    }

    /// Returns the value of a keyword argument at a place of a model; `None` if the norm does not have the keyword.
    pub fn value(&self, keyword: &str, context: &NormContext) -> Option<Value> {
        Some(self.options.iter().find(|option| option.name == keyword)?.value(context))
    }

    /// Returns all arguments of the norm at a place.
    pub fn at(&self, context: &NormContext) -> NormArgs {
        let values = self.options.iter().map(|keyword| (keyword.name.to_string(), keyword.value(context)));
        NormArgs { width: context.width, values: values.collect() }
    }

    /// Checks the keyword arguments of a module, and returns them with the module's width. A missing argument is read
    /// as null.
    pub fn given(&self, width: i64, mut values: Map<String, Value>) -> Result<NormArgs> {
        for keyword in self.options {
            let value = values.get_mut(keyword.name).map_or(Value::Null, Value::take);
            values.insert(keyword.name.to_string(), keyword.read(value)?);
        }
        let given = NormArgs { width, values };
        self.form_of(&given).map(|_| given)
    }

    /// Returns the form of the norm with these options, which may differ from the form shown in tables.
    pub fn form_of(&self, given: &NormArgs) -> Result<Form> {
        match self.form {
            Form::Chosen(_, choose) => choose(given),
            form => Ok(form),
        }
    }

    /// Computes y with PyTorch's operations for rows of this width. `parameters` are the values factor·(offset + p),
    /// and `options` are numbers, both in the order in which the norm declares them.
    pub fn composed(&self, x: &Tensor, width: i64, parameters: Vec<Option<Tensor>>, options: &[f64]) -> Result<Tensor> {
        let name = self.name;
        let (wanted_parameters, wanted_options) = (self.parameters.len(), self.options.len());
        if (wanted_parameters, wanted_options) != (parameters.len(), options.len()) {
            return Err(Error::invalid(format!(
                "{name} takes {wanted_parameters} parameters and {wanted_options} options, got {} and {}",
                parameters.len(),
                options.len()
            )));
        }
        for (declared, parameter) in self.parameters.iter().zip(&parameters) {
            let is_matrix = matches!(declared.shape, DeclaredShape::Matrix(_));
            if parameter.is_none() && !declared.is_affine() {
                return Err(Error::invalid(format!("{name} needs its parameter {}, got none", declared.name)));
            }
            if parameter.as_ref().is_some_and(|p| is_matrix != (p.dim() == 2)) {
                let wanted = if is_matrix { "be a matrix" } else { "have at most one dimension" };
                return Err(Error::invalid(format!("{name}: {} must {wanted}", declared.name)));
            }
        }
        let pairs = self.options.iter().zip(options);
        let decoded = pairs.map(|(option, number)| (option.name.to_string(), option.decode(*number)));
        let given = NormArgs { width, values: decoded.collect() };
        // A formula for y receives all parameters. A formula for x̂ receives those inside x̂, without weight and bias.
        if let Form::Whole(y) = self.form_of(&given)? {
            return composed::whole(y, x, &parameters, &given);
        }
        let (mut inside, mut weight, mut bias) = (Vec::new(), None, None);
        for (declared, parameter) in self.parameters.iter().zip(parameters) {
            match declared.name {
                "weight" => weight = parameter,
                "bias" => bias = parameter,
                _ => inside.extend(parameter),
            }
        }
        let x_hat = match self.form_of(&given)? {
            Form::Composed(x_hat) => x_hat,
            Form::Rows(kernels) => kernels.x_hat,
            Form::Operator(operator) => return (operator.composed)(x, weight.as_ref(), &given),
            Form::Chosen(..) | Form::Columns(_) | Form::Blended(_) | Form::Own(_) | Form::Whole(_) => {
                return Err(Error::invalid(format!("{name} has an operator of its own: call that")))
            }
        };
        composed::apply(x_hat, x, &inside, (weight.as_ref(), bias.as_ref()), &given)
    }

    /// Returns the keyword arguments of the module at a place, as JSON. Infinity becomes the text "inf".
    pub fn keyword_arguments(&self, context: &NormContext) -> Value {
        self.at(context).values.into()
    }

    /// Returns the norm as JSON, from which Python builds the module.
    pub fn describe(&self) -> Value {
        let parameter = |p: &Parameter| {
            let [start, std, offset, factor] = [p.start, p.std, p.offset, p.factor].map(Quantity::describe);
            let shape = p.shape.describe();
            json!({"name": p.name, "shape": shape, "start": start, "std": std, "offset": offset, "factor": factor})
        };
        let option = |option: &NormOption| {
            let default = option.value(&NormContext::ANY);
            let kind = match &default {
                Value::Bool(_) => "bool",
                Value::String(_) => "str",
                Value::Number(n) if n.is_i64() => "int",
                _ => "float",
            };
            let mut entry = json!({"name": option.name, "kind": kind, "default": default});
            if kind == "str" {
                entry["choices"] = json!(option.choices());
            }
            entry
        };
        let buffer = |b: &StateBuffer| {
            let shape = b.shape.describe();
            json!({"name": b.name, "shape": shape, "start": b.start, "is_counter": b.is_counter})
        };
        // If the form depends on the options, JSON has the form shown in tables.
        let shown = match self.form {
            Form::Chosen(shown, _) => *shown,
            form => form,
        };
        let (form, operator) = match shown {
            Form::Composed(_) | Form::Whole(_) => ("composed", None),
            Form::Rows(kernels) => ("rows", Some(kernels.operator)),
            Form::Columns(kernels) => ("columns", Some(kernels.operator)),
            Form::Blended(blend) => ("columns", Some(blend.columns.operator)),
            Form::Own(_) => ("own", None),
            Form::Chosen(..) | Form::Operator(_) => ("chosen", None),
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

impl NormContext<'_> {
    /// A place with default options, for callers that need no particular place.
    pub const ANY: NormContext<'static> = NormContext {
        width: 1,
        heads: 1,
        options: &Options::NONE,
        last_of_decoder: false,
        ends_stack: false,
        start: 1.0,
    };
}
