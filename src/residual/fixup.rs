//! The Fixups, which train without norms. R-Fixup has scalar shifts and scales (Zhang et al. 2019); T-Fixup only has
//! its own initialisation (Huang et al. 2020).

use super::{Change, Gain, LayerContext, Learned, Point, ResidualSpec, Scheme, StackName, StackSpec, Sublayer};
use crate::choice;
use crate::options::option_spec;

choice! {
    /// The version of r-fixup; `paper` adds a scalar before the attention's output projection.
    pub enum RFixupMode ("r_fixup_mode") { Release = "release", Paper = "paper" }
}

option_spec! {
    /// Version of r-fixup: as its authors released it, or with the paper's scalar before the attention's output
    /// projection.
    MODE ("r_fixup_mode"): RFixupMode = RFixupMode::Release;
}

pub static R_FIXUP: Scheme = Scheme {
    name: "r-fixup",
    equation: "x⁺ = x + s·F(x − b); feed-forward W₂(drop(relu(W₁(x−b₁)−b₂))−b₃); no norm, no other biases",
    source: "Zhang et al. 2019 (Fixup)",
    options: &[&MODE],
    init: "r-fixup",
    around,
    inside,
    stack,
    has_biases: false,
    ..Scheme::PLAIN
};

/// Declares x⁺ = x + s·F(x) with a learned scalar s, for R-Fixup.
fn around(place: &LayerContext) -> ResidualSpec {
    let scale = Learned::new(place.numbered("branch_scale"), &[1], 1.0);
    ResidualSpec { beta: Gain::Learned(scale), ..ResidualSpec::default() }
}

/// Returns R-Fixup's scalar shifts and scales: a shift before each linear map, and in the paper's form a scale after
/// the heads.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    let path = place.sublayer.path();
    let shift = |name: &str| Change::Shift(Learned::new(format!("{path}{name}"), &[1], 0.0));
    if place.sublayer == Sublayer::FeedForward {
        return vec![
            (Point::Input, shift("shift1")),
            (Point::BeforeActivation, shift("shift2")),
            (Point::AfterActivation, shift("shift3")),
        ];
    }
    let mut changes = vec![(Point::Input, shift("input_shift"))];
    if place.options.get(&MODE) == RFixupMode::Paper {
        let scale = Learned::new(format!("{path}output_scale"), &[1], 1.0);
        changes.push((Point::AfterHeads, Change::Scale(scale)));
    }
    changes
}

/// Shifts the stack's output, and in the encoder also scales it.
fn stack(place: &LayerContext) -> StackSpec {
    let mut end = vec![Change::Shift(Learned::new("end_shift", &[1], 0.0))];
    if place.stack == StackName::Encoder {
        end.push(Change::Scale(Learned::new("end_scale", &[1], 1.0)));
    }
    StackSpec { end, ..StackSpec::default() }
}

pub static T_FIXUP: Scheme = Scheme {
    name: "t-fixup",
    equation: "x⁺ = x + F(x), no norm",
    source: "Huang et al. 2020",
    init: "t-fixup",
    ..Scheme::PLAIN
};
