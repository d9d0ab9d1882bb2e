//! nGPT: the residual stream, branches, queries and keys are vectors of length 1, and each branch moves the stream
//! along the sphere (Loshchilov et al. 2024).

use super::{Change, Gain, LayerContext, Learned, Point, ResidualSpec, Scheme, Sublayer};

/// The initial value of |a|, the share of the branch in the sum.
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

fn around(place: &LayerContext) -> ResidualSpec {
    let base = base(place);
    let (of, temperature) = (Learned::new(place.numbered("share"), &[place.model.d_model], base), base / SHARE);
    ResidualSpec {
        skip: vec![Change::Unit(EPS)],
        branch: vec![Change::Unit(EPS)],
        after: vec![Change::Unit(EPS)],
        alpha: Gain::CoMagnitude { of: of.clone(), temperature },
        beta: Gain::Magnitude { of, temperature },
        ..ResidualSpec::default()
    }
}

fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    let model = &place.model;
    match place.sublayer {
        Sublayer::FeedForward => {
            let scaled = |point, name, width| {
                let s = Learned::new(name, &[width], 1.0);
                [(point, Change::Scale(s)), (point, Change::Times((model.d_model as f64).sqrt()))]
            };
            let first = scaled(Point::BeforeActivation, "linear1_scale", model.d_ff);
            // s_u scales W₃x. Scaling the product with W₃x after the activation gives the same.
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
            // √d_head replaces attention's own factor of scores.
            let of_scores = (d_head as f64).sqrt() / model.scaled.scores(d_head);
            let parts = [(model.d_model, of_scores), (place.kv_width(), 1.0)];
            let each = points.into_iter().zip(names).zip(parts);
            each.flat_map(|((point, name), (width, factor))| {
                let s = Learned::new(place.path_of(name), &[width], base(place));
                [Change::Unit(EPS), Change::Scale(s), Change::Times(factor / base(place))].map(|change| (point, change))
            })
            .collect()
        }
    }
}

/// Returns 1/√d, the value in which scales are stored where they mean 1. The numbers of a unit vector have this size,
/// so Adam changes both at the same pace.
fn base(place: &LayerContext) -> f64 {
    (place.model.d_model as f64).powf(-0.5)
}
