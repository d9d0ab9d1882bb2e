//! Options that name an entry of one of the package's tables.

use crate::error::Result;
use crate::options::FieldType;
use crate::parametrisation;
use serde::{Deserialize, Deserializer, Serialize};

/// A name out of one of the package's tables.
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
table_name!(/// A norm of [`crate::norm::NORMS`], or of [`FAMILIES`](crate::norm::families::FAMILIES).
    NormName, crate::norm::names(), crate::norm::find, per_layer: false);
table_name!(/// Residual schemes of [`crate::residual::SCHEMES`], one for all layers or one for each.
    ResidualName, crate::residual::SCHEMES.iter().map(|s| s.name()), crate::residual::Schemes::parse, per_layer: true);
table_name!(/// An initialisation of [`crate::init::INITS`].
    InitName, crate::init::INITS.iter().map(|i| i.name), crate::init::find, per_layer: false);
table_name!(/// A parametrisation of [`PARAMETRISATIONS`](crate::parametrisation::PARAMETRISATIONS).
    ParametrisationName, parametrisation::PARAMETRISATIONS.iter().map(|p| p.name), parametrisation::find, per_layer: false);
