//! Options. The type, default, choices and help text of an option are declared once, for Rust, the keys of a TOML
//! file, Python's keyword arguments and the flags of the command line. `config!` declares the options that are fields
//! of a configuration. A norm, a residual scheme or an initialisation declares its options as [`OptionSpec`]s in its
//! own file, and a configuration holds their values in [`Options`].

use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The description of one option, for Python, `--help` and the documentation.
#[derive(Debug, Clone, Serialize)]
pub struct Field {
    pub name: &'static str,
    /// "int", "float", "bool" or "str".
    pub kind: &'static str,
    pub optional: bool,
    pub default: Value,
    pub choices: Vec<&'static str>,
    /// True if layers may have different choices, written `choice*layers,…,choice`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub per_layer: bool,
    pub help: &'static str,
    /// The heading under which `--help` lists the option.
    pub group: &'static str,
}

/// A type that an option may have.
pub trait FieldType {
    /// The value of [`Field::kind`]; the other items are the values of the fields of the same names.
    const KIND: &'static str;
    const OPTIONAL: bool = false;
    const PER_LAYER: bool = false;
    /// Returns the words that are allowed; empty if values are not words.
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }
}

/// Implements [`FieldType`] for types whose values are not words, each with its kind: `field_types!(i64 => "int", …)`.
macro_rules! field_types {
    ($($t:ty => $kind:literal),*) => { $(impl FieldType for $t { const KIND: &'static str = $kind; })* };
}
field_types!(i64 => "int", u64 => "int", f64 => "float", bool => "bool", String => "str");

impl<T: FieldType> FieldType for Option<T> {
    const KIND: &'static str = T::KIND;
    const OPTIONAL: bool = true;
    fn choices() -> Vec<&'static str> {
        T::choices()
    }
}

/// Declares an option type whose values are a fixed set of words.
#[macro_export]
macro_rules! choice {
    ($(#[$meta:meta])* pub enum $name:ident ($what:literal) { $($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant),+ }
        impl $name {
            /// Returns the word for this choice.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
            /// Returns the choice for a word; an error lists all words.
            pub fn parse(word: &str) -> $crate::error::Result<Self> {
                match word {
                    $($word => Ok($name::$variant),)+
                    other => Err($crate::error::unknown($what, other, [$($word),+])),
                }
            }
        }
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_str(self.name())
            }
        }
        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                let word = String::deserialize(d)?;
                $name::parse(&word).map_err(serde::de::Error::custom)
            }
        }
        impl $crate::options::FieldType for $name {
            const KIND: &'static str = "str";
            fn choices() -> Vec<&'static str> { vec![$($word),+] }
        }
    };
}

/// An option that a norm, a residual scheme or an initialisation (its owner) declares. The option's name begins with
/// the owner's name, unless several owners share the option.
#[derive(Clone, Copy)]
pub struct OptionSpec<T> {
    pub name: &'static str,
    pub default: T,
    /// Errors if a value has the right type but is not allowed. The arguments are the option's name and the value.
    pub check: fn(&str, T) -> Result<()>,
    pub help: &'static str,
}

/// An [`OptionSpec`] of any type.
pub trait AnyOption: Sync {
    fn name(&self) -> &'static str;

    /// Describes the option under the heading `group` of `--help`.
    fn field(&self, group: &'static str) -> Field;

    /// Converts a value from JSON to the form that [`Options`] keeps; errors if it has the wrong type.
    fn read(&self, value: Value) -> serde_json::Result<Value>;

    /// Errors if the option's value in `options` is not allowed.
    fn check(&self, options: &Options) -> Result<()>;

    /// Converts and checks a value. Error messages call the option `name`, which may be another name than its own.
    fn accept(&self, name: &str, value: Value) -> Result<Value>;
}

impl<T: Copy + Sync + FieldType + Serialize + DeserializeOwned> AnyOption for OptionSpec<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    /// Describes the option under the heading `group` of `--help`.
    fn field(&self, group: &'static str) -> Field {
        Field {
            name: self.name,
            kind: T::KIND,
            optional: T::OPTIONAL,
            default: plain(self.default),
            choices: T::choices(),
            per_layer: T::PER_LAYER,
            help: self.help,
            group,
        }
    }

    /// Converts a value from JSON to T and back, which checks its type.
    fn read(&self, value: Value) -> serde_json::Result<Value> {
        serde_json::from_value::<T>(value).map(plain)
    }

    /// Errors if the option's value in `options` is not allowed.
    fn check(&self, options: &Options) -> Result<()> {
        (self.check)(self.name, options.get(self))
    }

    /// Converts a value from JSON and checks it; error messages call the option `name`.
    fn accept(&self, name: &str, value: Value) -> Result<Value> {
        let wrong = |e: serde_json::Error| Error::invalid(format!("{name}: {e}"));
        let value = serde_json::from_value::<T>(value).map_err(wrong)?;
        (self.check)(name, value)?;
        Ok(plain(value))
    }
}

/// Converts an option's value to JSON.
pub(crate) fn plain(value: impl Serialize) -> Value {
    serde_json::to_value(value).expect("an option is plain data")
}

/// The values of options that norms, residual schemes and initialisations declare; an option without a value has its
/// default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options(BTreeMap<&'static str, Value>);

impl Options {
    /// Options without values, so that every option has its default.
    pub const NONE: Options = Options(BTreeMap::new());

    /// Returns the option's value, or its default.
    pub fn get<T: Copy + DeserializeOwned>(&self, option_spec: &OptionSpec<T>) -> T {
        match self.0.get(option_spec.name) {
            // `set` has checked that the value has type T.
            Some(value) => serde_json::from_value(value.clone()).expect("`set` has read it"),
            None => option_spec.default,
        }
    }

    /// Returns the option's value as JSON.
    pub fn value(&self, option_spec: &dyn AnyOption) -> Value {
        self.0.get(option_spec.name()).cloned().unwrap_or_else(|| option_spec.field("").default)
    }

    /// Sets the option's value. The default is not stored, so that equal settings are equal `Options`.
    pub fn set(&mut self, option_spec: &dyn AnyOption, value: Value) -> serde_json::Result<()> {
        let value = option_spec.read(value)?;
        if value == option_spec.field("").default {
            self.0.remove(option_spec.name());
        } else {
            self.0.insert(option_spec.name(), value);
        }
        Ok(())
    }
}

/// Returns the options in order, without repeating an option that several owners declare.
pub fn distinct(declared: impl Iterator<Item = &'static dyn AnyOption>) -> Vec<&'static dyn AnyOption> {
    let mut options: Vec<&'static dyn AnyOption> = Vec::new();
    for option_spec in declared {
        if options.iter().all(|known| known.name() != option_spec.name()) {
            options.push(option_spec);
        }
    }
    options
}

/// Accepts any value. Like the functions below, it is a value of [`OptionSpec::check`]: it takes the option's name, for
/// the error message, and the value.
pub fn anything<T>(_: &str, _: T) -> Result<()> {
    Ok(())
}

/// Accepts the integers 0, 1, 2, …
pub fn not_negative(name: &str, value: i64) -> Result<()> {
    match value >= 0 {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must be at least 0, got {value}"))),
    }
}

/// Accepts the integers 1, 2, 3, …
pub fn at_least_one(name: &str, value: i64) -> Result<()> {
    match value >= 1 {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must be at least 1, got {value}"))),
    }
}

/// Accepts numbers up to `most`.
pub fn at_most(name: &str, value: i64, most: i64) -> Result<()> {
    match value <= most {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must be at most {most}, got {value}"))),
    }
}

/// Accepts finite numbers above 0.
pub fn positive(name: &str, value: f64) -> Result<()> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must be above 0, got {value}"))),
    }
}

/// Accepts 0 and finite numbers above 0.
pub fn zero_or_more(name: &str, value: f64) -> Result<()> {
    match value >= 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must be at least 0, got {value}"))),
    }
}

/// True if a number is finite in float32, the type of most models' parameters.
pub fn is_finite_in_f32(value: f64) -> bool {
    value.abs() <= f64::from(f32::MAX)
}

/// Accepts numbers in [0, 1), such as probabilities.
pub fn below_one(name: &str, value: f64) -> Result<()> {
    match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => Err(Error::invalid(format!("{name} must lie in [0, 1), got {value}"))),
    }
}

/// Declares [`OptionSpec`]s as constants, in the form `/// help; NAME ("key"): type = default, check;`. If the check
/// is left out, it is [`anything`].
macro_rules! option_spec {
    ($($(#[doc = $doc:literal])+ $vis:vis $name:ident ($key:literal): $ty:ty = $default:expr $(, $check:expr)?;)+) => { $(
        $(#[doc = $doc])+
        $vis const $name: $crate::options::OptionSpec<$ty> = $crate::options::OptionSpec {
            name: $key,
            default: $default,
            check: $crate::options::option_spec!(@check $($check)?),
            help: concat!($($doc),+).trim_ascii(),
        };
    )+ };
    (@check) => { $crate::options::anything };
    (@check $check:expr) => { $check };
}
pub(crate) use option_spec;

/// Declares a struct of options, in groups that are headings of `--help`: `"group" { /// help; name: type = default,
/// … }`.
///
/// A struct declared `with options` has one more field, named `options`, for the options of norms, schemes and
/// initialisations. `"group" { … } + option_specs` adds the options that the function `option_specs` returns to the
/// end of the group. In JSON, they are keys like the other options.
macro_rules! config {
    ($(#[$meta:meta])* pub struct $name:ident { $($group:literal {
        $($(#[doc = $doc:literal])+ $field:ident : $ty:ty = $default:expr),+ $(,)?
    })+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($($(#[doc = $doc])+ pub $field: $ty,)+)+ }

        impl Default for $name {
            fn default() -> Self {
                $name { $($($field: $default,)+)+ }
            }
        }

        impl $name {
            /// Returns every option, in order.
            pub fn fields() -> Vec<Field> {
                let default = $name::default();
                vec![$($(config!(@field default, $group, $field: $ty, $($doc),+),)+)+]
            }
        }
    };

    ($(#[$meta:meta])* pub struct $name:ident with $options:ident { $($group:literal {
        $($(#[doc = $doc:literal])+ $field:ident : $ty:ty = $default:expr),+ $(,)?
    } $(+ $option_specs:path)*)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($($(#[doc = $doc])+ pub $field: $ty,)+)+
            /// The options that norms, schemes and initialisations declare.
            pub $options: Options,
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($($field: $default,)+)+ $options: Options::default() }
            }
        }

        impl $name {
            /// Returns every option, in order.
            pub fn fields() -> Vec<Field> {
                let (default, mut fields) = ($name::default(), Vec::new());
                $(
                    fields.extend([$(config!(@field default, $group, $field: $ty, $($doc),+)),+]);
                    $(fields.extend($option_specs().iter().map(|option_spec| option_spec.field($group)));)*
                )+
                fields
            }

            /// Returns the options that norms, schemes and initialisations declare.
            pub fn option_specs() -> Vec<&'static dyn AnyOption> {
                [$($($option_specs(),)*)+].concat()
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
                use serde::ser::SerializeMap;
                let mut map = s.serialize_map(None)?;
                let options = &self.$options;
                $(
                    $(map.serialize_entry(stringify!($field), &self.$field)?;)+
                    $(for option_spec in $option_specs() {
                        map.serialize_entry(option_spec.name(), &options.value(option_spec))?;
                    })*
                )+
                map.end()
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
                struct Reader;

                impl<'de> serde::de::Visitor<'de> for Reader {
                    type Value = $name;

                    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                        f.write_str(concat!("struct ", stringify!($name)))
                    }

                    /// Reads a JSON object; an option without a key keeps its default.
                    fn visit_map<M: serde::de::MapAccess<'de>>(
                        self,
                        mut map: M,
                    ) -> std::result::Result<$name, M::Error> {
                        let (mut read, mut seen) = ($name::default(), std::collections::HashSet::new());
                        let option_specs = $name::option_specs();
                        while let Some(name) = map.next_key::<String>()? {
                            if seen.contains(&name) {
                                return Err(serde::de::Error::custom(format!("duplicate field `{name}`")));
                            }
                            // A key is a field, or an option of a norm, scheme or initialisation.
                            match name.as_str() {
                                $($(stringify!($field) => read.$field = map.next_value()?,)+)+
                                name => match option_specs.iter().find(|spec| spec.name() == name) {
                                    Some(spec) => {
                                        read.$options.set(*spec, map.next_value()?).map_err(serde::de::Error::custom)?
                                    }
                                    None => return Err(unknown_field(name, &$name::fields())),
                                },
                            }
                            seen.insert(name);
                        }
                        Ok(read)
                    }
                }

                d.deserialize_map(Reader)
            }
        }
    };

    (@field $default_of:ident, $group:literal, $field:ident: $ty:ty, $($doc:literal),+) => {
        Field {
            name: stringify!($field),
            kind: <$ty as FieldType>::KIND,
            optional: <$ty as FieldType>::OPTIONAL,
            default: $crate::options::plain(&$default_of.$field),
            choices: <$ty as FieldType>::choices(),
            per_layer: <$ty as FieldType>::PER_LAYER,
            help: concat!($($doc),+).trim_ascii(),
            group: $group,
        }
    };
}
pub(crate) use config;

/// Builds serde's error for an unknown key.
pub(crate) fn unknown_field<E: serde::de::Error>(name: &str, known: &[Field]) -> E {
    let known: Vec<String> = known.iter().map(|field| format!("`{}`", field.name)).collect();
    E::custom(format!("unknown field `{name}`, expected one of {}", known.join(", ")))
}
