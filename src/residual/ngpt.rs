//! nGPT: the residual stream, branches, queries and keys are vectors of length 1, and each branch moves the stream
//! along the sphere (Loshchilov et al. 2024).

use super::{Change, Gain, LayerContext, Learned, Point, ResidualSpec, Scheme, Sublayer};

/// The initial value of |a|, the weight of the branch in the sum.
const SHARE: f64 = 0.05;
/// The smallest length by which a vector is divided.
const EPS: f64 = 1e-12;

pub static NGPT: Scheme = Scheme {
    name: "ngpt",
    equation: "u(x) = x/‖x‖₂; x⁺ = u(u(x) + |a|⊙(u(F(x)) − u(x))), a per column, 0.05 at the start; inside attention s⊙u(q) and \
     s⊙u(k) of each head, scores times √d_head; the products before the activation times √d⊙s_v, those of a gate times √d⊙s_u; no norms",
    source: "Loshchilov et al. 2024 (nGPT)",
    init: "gpt2",
    around,
    inside,
    own_depth: Some("every addition goes back to the sphere"),
    on_sphere: true,
    ..Scheme::PLAIN
};

/// Declares x⁺ = u(u(x) + |a|⊙(u(F(x)) − u(x))), in which u scales a vector to length 1: α = 1 − |a| and β = |a|.
fn around(place: &LayerContext) -> ResidualSpec {
    // |a| = |w/τ|, in which w begins at `base`. With this temperature τ it begins at `SHARE`.
    let base = base(place);
    let (w, temperature) = (Learned::new(place.numbered("share"), &[place.model.d_model], base), base / SHARE);
    ResidualSpec {
        skip: vec![Change::Unit(EPS)],
        branch: vec![Change::Unit(EPS)],
        after: vec![Change::Unit(EPS)],
        alpha: Gain::CoMagnitude { of: w.clone(), temperature },
        beta: Gain::Magnitude { of: w, temperature },
        ..ResidualSpec::default()
    }
}

/// Declares the scales inside a sublayer: of the products before the activation, or of unit queries and keys.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    let model = &place.model;
    match place.sublayer {
        Sublayer::FeedForward => {
            // Returns a learned scale of this width and the constant √d, both at the point.
            let scaled = |point, name, width| {
                let scale = Learned::new(name, &[width], 1.0);
                [(point, Change::Scale(scale)), (point, Change::Times((model.d_model as f64).sqrt()))]
            };
            let first = scaled(Point::BeforeActivation, "linear1_scale", model.d_ff);
            // s_u is the scale of W₃x. It may come after the product: σ(W₁x)⊙(s_u⊙W₃x) = s_u⊙(σ(W₁x)⊙W₃x).
            let gate = model.activation.is_gated().then(|| scaled(Point::AfterActivation, "linear3_scale", model.d_ff));
            first.into_iter().chain(gate.into_iter().flatten()).collect()
        }
        kind => {
            let points = match kind {
                Sublayer::SelfAttention => [Point::RotatedQuery, Point::RotatedKey],
                _ => [Point::Query, Point::Key],
            };
            // Grouped heads have fewer keys than queries, so the two cannot share one scale.
            let names = match model.kv_heads == model.heads {
                true => ["qk_scale"; 2],
                false => ["query_scale", "key_scale"],
            };
            let d_head = place.d_head();
            // The queries' factor divides out attention's own factor of scores and puts √d_head in its place.
            let query_factor = (d_head as f64).sqrt() / model.scaled.scores(d_head);
            let widths_and_factors = [(model.d_model, query_factor), (place.kv_width(), 1.0)];
            let mut changes = Vec::new();
            for ((point, name), (width, factor)) in points.into_iter().zip(names).zip(widths_and_factors) {
                let scale = Change::Scale(Learned::new(place.path_of(name), &[width], base(place)));
                let factor = Change::Times(factor / base(place));
                changes.extend([Change::Unit(EPS), scale, factor].map(|change| (point, change)));
            }
            changes
        }
    }
}

/// Returns 1/√d, the stored value of a scale of 1. The elements of a unit vector have the same size, so Adam changes
/// scales and unit vectors at the same relative pace.
fn base(place: &LayerContext) -> f64 {
    (place.model.d_model as f64).powf(-0.5)
}
