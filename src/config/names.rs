//! Options that name an entry of one of the package's tables.

use crate::error::{unknown, Result};
use crate::options::FieldType;
use serde::{Deserialize, Deserializer, Serialize};

/// A name out of one of the package's tables.
macro_rules! table_name {
    ($(#[$meta:meta])* $name:ident, $what:literal, $names:expr) => {
        $(#[$meta])*
        #[derive(Clone, Debug, PartialEq, Eq, Serialize)]
        pub struct $name(pub(super) String);
        impl $name {
            pub fn parse(word: &str) -> Result<Self> {
                if !$names.any(|n| n == word) {
                    return Err(unknown($what, word, $names));
                }
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
            fn choices() -> Vec<&'static str> { $names.collect() }
        }
    };
}
table_name!(/// A norm of [`crate::norm::NORMS`].
    NormName, "norm", crate::norm::NORMS.iter().map(|n| n.name));
table_name!(/// A residual scheme of [`crate::residual::SCHEMES`].
    ResidualName, "residual", crate::residual::SCHEMES.iter().map(|s| s.name()));
table_name!(/// An initialisation of [`crate::init::INITS`].
    InitName, "init", crate::init::INITS.iter().map(|i| i.name));
