//! A norm that a user declares in Python (python/normformer_rs/declarations/norm.py): y = f(x, parameters; options).
//! f is a function of torch tensors, which the training loop calls through PyTorch's dispatcher.
//!
//! Each declaration is stored once and for the life of the process, so that it is a `&'static Spec`, like those in the
//! table of built-in norms.

use super::operators::{OwnNorm, MOST};
use super::spec::{DeclaredShape, Form, Numbers, Parameter, Quantity, Size, Spec, WEIGHT};
use crate::error::{Error, Result};
use crate::options::is_finite_in_f32;
use crate::parametrisation::SumsOver;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Mutex;

/// The declaration of a norm in one model, as config.json stores it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenNorm {
    pub name: String,
    #[serde(default)]
    pub equation: String,
    #[serde(default)]
    pub source: String,
    /// The parameters, in the order of f's arguments.
    pub parameters: Vec<GivenParameter>,
    #[serde(default)]
    pub options: BTreeMap<String, f64>,
}

/// The declaration of a learned parameter p. f receives the value factor·(offset + p).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GivenParameter {
    pub name: String,
    pub shape: GivenShape,
    /// The initial value of p for each width of the norm.
    pub start: BTreeMap<i64, f64>,
    /// The standard deviation of the initial values of p around `start`.
    #[serde(default)]
    pub std: f64,
    #[serde(default)]
    pub offset: f64,
    #[serde(default = "one")]
    pub factor: f64,
}

/// The shape of a parameter: the name of a shape, or the two sides of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a shape is \"one\", \"width\", or a matrix's two sides, each a number or \"width\"")]
pub enum GivenShape {
    Named(GivenName),
    Matrix([GivenSide; 2]),
}

/// The name of a shape: one number, or one number per column.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GivenName {
    One,
    Width,
}

/// The length of a matrix's side: a number, or the norm's width.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum GivenSide {
    Number(i64),
    Width(GivenWidth),
}

/// The word "width" in JSON; serde refuses every other word.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GivenWidth {
    Width,
}

impl GivenShape {
    /// Returns the two sides of a matrix; empty for every other shape.
    fn sides(&self) -> &[GivenSide] {
        match self {
            GivenShape::Named(_) => &[],
            GivenShape::Matrix(sides) => sides,
        }
    }

    /// Converts the shape to the form of the table of norms.
    fn declared(self) -> DeclaredShape {
        match self {
            GivenShape::Named(GivenName::One) => DeclaredShape::One,
            GivenShape::Named(GivenName::Width) => DeclaredShape::Width,
            GivenShape::Matrix(sides) => DeclaredShape::Matrix(sides.map(|side| match side {
                GivenSide::Number(number) => Size::Is(number),
                GivenSide::Width(_) => Size::Width,
            })),
        }
    }
}

/// Returns the default of a parameter's `factor`, for serde.
fn one() -> f64 {
    1.0
}

/// A user's declaration, and the entry made from it.
struct RegisteredNorm {
    given: &'static GivenNorm,
    spec: &'static Spec,
}

/// The norms that users have declared in this process.
static KNOWN: Mutex<Vec<RegisteredNorm>> = Mutex::new(Vec::new());

/// Returns the entry for this declaration, and makes one if there is none. The entry's name is the declaration's, with
/// a number added if another declaration in the process has the same name.
pub fn entry(given: GivenNorm) -> Result<&'static Spec> {
    check(&given)?;
    // The list is valid even if a thread panicked while it had the lock, so poisoning is ignored.
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(registered) = known.iter().find(|known| *known.given == given) {
        return Ok(registered.spec);
    }
    let namesakes = known.iter().filter(|known| known.given.name == given.name).count();
    let name = if namesakes == 0 { given.name.clone() } else { format!("{}#{}", given.name, namesakes + 1) };
    // Leaked memory is never freed, so the entry may be `&'static`.
    let given: &'static GivenNorm = Box::leak(Box::new(given));
    let own =
        OwnNorm { name: &given.name, declaration: serde_json::to_string(given).expect("numbers and words are JSON") };
    let parameters: Vec<Parameter> = given.parameters.iter().map(GivenParameter::declared).collect();
    let spec: &'static Spec = Box::leak(Box::new(Spec {
        name: Box::leak(name.into_boxed_str()),
        module: "OwnNorm",
        equation: &given.equation,
        source: &given.source,
        parameters: Box::leak(parameters.into_boxed_slice()),
        buffers: &[],
        options: &[],
        form: Form::Own(Box::leak(Box::new(own))),
    }));
    known.push(RegisteredNorm { given, spec });
    Ok(spec)
}

/// Returns the entry with this name, if [`entry`] has made one.
pub fn find(name: &str) -> Option<&'static Spec> {
    KNOWN.lock().unwrap_or_else(|e| e.into_inner()).iter().find(|known| known.spec.name == name).map(|known| known.spec)
}

/// Returns the declaration from which [`entry`] made the entry with this name.
pub fn declared(name: &str) -> Option<&'static GivenNorm> {
    KNOWN
        .lock()
        .unwrap_or_else(|e| e.into_inner())
        .iter()
        .find(|known| known.spec.name == name)
        .map(|known| known.given)
}

impl GivenParameter {
    /// Converts the parameter to the form of the table of norms.
    fn declared(&'static self) -> Parameter {
        Parameter {
            name: &self.name,
            shape: self.shape.declared(),
            start: Quantity::ByWidth(&self.start),
            std: Quantity::Is(self.std),
            offset: Quantity::Is(self.offset),
            factor: Quantity::Is(self.factor),
            // Products with a matrix are summed over its columns, the second side.
            sums_over: match self.shape.sides() {
                [_, GivenSide::Width(_)] => SumsOver::Width,
                _ => SumsOver::Nothing,
            },
            is_gain: self.name == WEIGHT.name,
            is_present: |_| true,
        }
    }
}

/// Errors if a declaration has an invalid name, parameter or number.
fn check(given: &GivenNorm) -> Result<()> {
    let wrong = |why: String| Err(Error::invalid(format!("norm {:?}: {why}", given.name)));
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_' || c == '.';
    if given.name.is_empty() || !given.name.chars().all(is_word) {
        return wrong("a norm's name must be made of letters, digits, -, _ and .: give it another".into());
    }
    if given.parameters.len() > MOST {
        return wrong(format!("it has {} parameters, and at most {MOST} are possible", given.parameters.len()));
    }
    for (i, parameter) in given.parameters.iter().enumerate() {
        let GivenParameter { name, start, std, offset, factor, shape } = parameter;
        let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !is_name(name) {
            return wrong(format!("{name:?} is no parameter's name: it needs letters, digits and _"));
        }
        if given.parameters[..i].iter().any(|other| other.name == *name) {
            return wrong(format!("two parameters are called {name:?}"));
        }
        if shape.sides().iter().any(|side| matches!(side, GivenSide::Number(number) if *number < 1)) {
            return wrong(format!("{name:?} is a matrix with a side below 1"));
        }
        // `start` has a value per width and is checked below. So these numbers give only factor·offset.
        let numbers = Numbers { start: 0.0, std: 0.0, offset: *offset, factor: *factor };
        if !(*std >= 0.0 && is_finite_in_f32(*std)) {
            return wrong(format!("{name:?} has a std of {std:e}: it must be finite in float32 and at least 0"));
        }
        if !start.values().all(|value| is_finite_in_f32(*value))
            || !is_finite_in_f32(numbers.at_start())
            || *factor == 0.0
        {
            return wrong(format!(
                "{name:?} has a start, an offset or a factor that is not finite in float32, or a factor of 0"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Declares a norm "own" with one number g, whose initial value is `start` at width 4.
    fn given(start: f64) -> GivenNorm {
        let text =
            format!(r#"{{"name": "own", "parameters": [{{"name": "g", "shape": "one", "start": {{"4": {start}}}}}]}}"#);
        serde_json::from_str(&text).unwrap()
    }

    #[test]
    fn each_declaration_has_one_entry() {
        let (first, second) = (entry(given(1.0)).unwrap(), entry(given(2.0)).unwrap());
        assert!(std::ptr::eq(first, entry(given(1.0)).unwrap()) && first.name != second.name);
        assert!(std::ptr::eq(find(second.name).unwrap(), second) && declared(second.name).unwrap().name == "own");
    }

    #[test]
    fn wrong_declarations_say_why() {
        for (change, why) in [
            (GivenNorm { name: "a b".into(), ..given(1.0) }, "made of letters"),
            (
                GivenNorm { parameters: [given(1.0).parameters, given(1.0).parameters].concat(), ..given(1.0) },
                "two parameters",
            ),
        ] {
            assert!(entry(change).err().unwrap().to_string().contains(why), "{why}");
        }
    }
}
