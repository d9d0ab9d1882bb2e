//! Options whose value names an entry of one of the package's tables.

use crate::error::Result;
use crate::norm::{self, given::GivenNorm};
use crate::options::FieldType;
use crate::parametrisation;
use crate::residual::{GivenScheme, Schemes, SCHEMES};
use serde::de::{value::MapAccessDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Declares an option type whose value is a name in one of the package's tables. `$names` iterates over the table's
/// names; `$check` errors for a word that is none of them. `$per_layer` is true if each layer may have its own value.
macro_rules! table_name {
    ($(#[$meta:meta])* $name:ident, $names:expr, $check:expr, per_layer: $per_layer:literal) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        pub struct $name(pub(super) String);
        impl $name {
            pub fn parse(word: &str) -> Result<Self> {
                $check(word)?;
                Ok($name(word.to_string()))
            }
            pub fn as_str(&self) -> &str { &self.0 }
        }
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                $name::parse(&String::deserialize(d)?).map_err(serde::de::Error::custom)
            }
        }
        impl FieldType for $name {
            const KIND: &'static str = "str";
            const PER_LAYER: bool = $per_layer;
            fn choices() -> Vec<&'static str> { $names.collect() }
        }
    };
}
table_name!(/// An initialisation of [`crate::init::INITS`].
    InitName, crate::init::INITS.iter().map(|i| i.name), crate::init::find, per_layer: false);
table_name!(/// A parametrisation of [`PARAMETRISATIONS`](crate::parametrisation::PARAMETRISATIONS).
    ParametrisationName, parametrisation::PARAMETRISATIONS.iter().map(|p| p.name), parametrisation::find, per_layer: false);

/// The names of residual schemes: one of [`SCHEMES`] for all layers, one for each layer, or one that a user declares
/// as data.
#[derive(Clone, Debug, PartialEq)]
pub struct Residual {
    /// The names as the user gave them.
    word: String,
    schemes: Schemes,
}

impl Residual {
    /// Parses the names of schemes, such as `prenorm` or `postnorm*3,prenorm`.
    pub fn parse(word: &str) -> Result<Self> {
        Ok(Residual { word: word.into(), schemes: Schemes::parse(word)? })
    }

    /// Uses a scheme that a user declares. Errors if the initialisation that it names does not exist.
    pub fn given(scheme: GivenScheme) -> Result<Self> {
        crate::init::find(&scheme.init)?;
        Ok(Residual { word: scheme.name.clone(), schemes: Schemes::given(scheme)? })
    }

    /// Returns the names of the schemes as the user gave them.
    pub fn as_str(&self) -> &str {
        &self.word
    }

    pub fn schemes(&self) -> &Schemes {
        &self.schemes
    }
}

impl Serialize for Residual {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self.schemes.as_given() {
            Some(given) => given.serialize(s),
            None => s.serialize_str(&self.word),
        }
    }
}

impl<'de> Deserialize<'de> for Residual {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        d.deserialize_any(WordOrScheme)
    }
}

/// Reads a [`Residual`] from a string with names of schemes, or from a map that declares a scheme.
struct WordOrScheme;

impl<'de> Visitor<'de> for WordOrScheme {
    type Value = Residual;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a residual scheme's name, or what it declares")
    }

    fn visit_str<E: serde::de::Error>(self, word: &str) -> std::result::Result<Residual, E> {
        Residual::parse(word).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<Residual, A::Error> {
        let scheme = GivenScheme::deserialize(MapAccessDeserializer::new(map))?;
        Residual::given(scheme).map_err(serde::de::Error::custom)
    }
}

impl FieldType for Residual {
    const KIND: &'static str = "str";
    const PER_LAYER: bool = true;
    fn choices() -> Vec<&'static str> {
        SCHEMES.iter().map(|scheme| scheme.name).collect()
    }
}

/// The name of a norm: one of [`crate::norm::NORMS`], one of [`FAMILIES`](crate::norm::families::FAMILIES), or one
/// that a user declares.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NormName(&'static str);

impl NormName {
    /// Finds a norm by its name. Errors if there is none.
    pub fn parse(word: &str) -> Result<Self> {
        // The name of a family, such as `rmsnorm:llama`, is kept; `norm::find` would return the entry of rmsnorm. Only
        // the names of norms that users declare are not among `norm::names`.
        match norm::names().find(|name| *name == word) {
            Some(name) => Ok(NormName(name)),
            None => norm::find(word).map(|spec| NormName(spec.name)),
        }
    }

    pub fn as_str(&self) -> &str {
        self.0
    }
}

impl Serialize for NormName {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match norm::given::declared(self.0) {
            Some(given) => given.serialize(s),
            None => s.serialize_str(self.0),
        }
    }
}

impl<'de> Deserialize<'de> for NormName {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        /// Reads a name of a norm from a string, or from a map that declares a norm.
        struct WordOrNorm;
        impl<'de> Visitor<'de> for WordOrNorm {
            type Value = NormName;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a norm's name, or what it declares")
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> std::result::Result<NormName, E> {
                NormName::parse(word).map_err(E::custom)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<NormName, A::Error> {
                let given = GivenNorm::deserialize(MapAccessDeserializer::new(map))?;
                // A user's norm must not hide one of the package's.
                if norm::names().any(|name| name == given.name) {
                    let why = format!("norm {:?}: the name is one of this package's: give it another", given.name);
                    return Err(serde::de::Error::custom(why));
                }
                norm::given::entry(given).map(|spec| NormName(spec.name)).map_err(serde::de::Error::custom)
            }
        }
        d.deserialize_any(WordOrNorm)
    }
}

impl FieldType for NormName {
    const KIND: &'static str = "str";
    fn choices() -> Vec<&'static str> {
        norm::names().collect()
    }
}
