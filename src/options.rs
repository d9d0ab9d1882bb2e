//! What an option is: its type, its default, its choices and its line of help, declared once (`config!`) for the Rust
//! struct, a TOML file's keys, Python's keyword arguments and the command line's flags.

use serde::Serialize;

/// One option, for those who list them (Python, `--help`, the documentation).
#[derive(Debug, Clone, Serialize)]
pub struct Field {
    pub name: &'static str,
    /// int, float, bool or str.
    pub kind: &'static str,
    pub optional: bool,
    pub default: serde_json::Value,
    pub choices: Vec<&'static str>,
    /// Layers may have different choices: `choice*layers,…,choice`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub per_layer: bool,
    pub help: &'static str,
    /// The heading of `--help` that lists it.
    pub group: &'static str,
}

/// A type that an option may have.
pub trait FieldType {
    const KIND: &'static str;
    const OPTIONAL: bool = false;
    const PER_LAYER: bool = false;
    fn choices() -> Vec<&'static str> {
        Vec::new()
    }
}

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

/// An option with a fixed set of words.
#[macro_export]
macro_rules! choice {
    ($(#[$meta:meta])* pub enum $name:ident ($what:literal) { $($(#[$doc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
        pub enum $name { $($(#[$doc])* #[serde(rename = $word)] $variant),+ }
        impl $name {
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
            pub fn parse(word: &str) -> $crate::error::Result<Self> {
                match word {
                    $($word => Ok($name::$variant),)+
                    other => Err($crate::error::unknown($what, other, [$($word),+])),
                }
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

/// A struct of options, in groups named as `--help` lists them: `"group" { /// help; name: type = default, … }`.
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
            /// Every option, in order.
            pub fn fields() -> Vec<Field> {
                let default = $name::default();
                vec![$($(Field {
                    name: stringify!($field),
                    kind: <$ty as FieldType>::KIND,
                    optional: <$ty as FieldType>::OPTIONAL,
                    default: serde_json::to_value(&default.$field).expect("an option's default is plain data"),
                    choices: <$ty as FieldType>::choices(),
                    per_layer: <$ty as FieldType>::PER_LAYER,
                    help: concat!($($doc),+).trim_ascii(),
                    group: $group,
                },)+)+]
            }
        }
    };
}
pub(crate) use config;
