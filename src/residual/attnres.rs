//! Attention residuals: a sublayer's input is a softmax-weighted sum of earlier sublayers' outputs (Kimi Team 2026).

use super::{
    prenorm::PRENORM, Change, DepthAttention, DepthWeights, LayerContext, Learned, Mixing, Point, ResidualSpec, Scheme,
    StackSpec, Sublayer,
};
use crate::choice;
use crate::error::{Error, Result};
use crate::options::{at_least_one, option_spec, Options};
use crate::parametrisation::SumsOver;

choice! {
    /// The form of the sum in attnres: plain outputs, or outputs divided by their root mean squares.
    pub enum AttnResForm ("attnres_form") { Plain = "plain", Normed = "normed" }
}

option_spec! {
    /// Number of consecutive sublayers whose outputs attnres sums; later sublayers attend to the sums. 1: to each
    /// output.
    BLOCK ("attnres_block"): i64 = 1, at_least_one;
    /// Form of attnres: sum outputs (plain), or outputs over their root mean squares by scores over √d (normed).
    FORM ("attnres_form"): AttnResForm = AttnResForm::Plain;
    /// Number of queries with which attnres' normed form reads the input of self-attention: 1, or 3 for separate ones
    /// for q, k and v.
    QUERIES ("attnres_queries"): i64 = 1, one_or_three;
}

/// Errors unless the option `name` has the value 1 or 3.
fn one_or_three(name: &str, value: i64) -> Result<()> {
    match value {
        1 | 3 => Ok(()),
        other => Err(Error::invalid(format!("{name} must be 1 or 3, got {other}"))),
    }
}

pub static ATTNRES: Scheme = Scheme {
    name: "attnres",
    equation:
        "input of a sublayer: N(Σ_i a_i v_i), a = softmax_i⟨w, RMS(v_i)⟩, v_0 = x, v_i = F_i; the same after the stack",
    source: "Kimi Team 2026 (Attention Residuals)",
    options: &[&BLOCK, &FORM, &QUERIES],
    check,
    around,
    inside,
    stack,
    own_depth: Some("its inputs are averages of outputs"),
    ..Scheme::PLAIN
};

/// Errors if several queries are asked for in the plain form, which has only one.
fn check(options: &Options) -> Result<()> {
    match (options.get(&FORM), options.get(&QUERIES)) {
        (AttnResForm::Plain, queries) if queries != 1 => Err(Error::invalid(format!(
            "attnres_queries = {queries} is an option of attnres_form = \"normed\", and here it is \"plain\": leave it out"
        ))),
        _ => Ok(()),
    }
}

/// Declares the attention over depth that computes the sublayer's input. The first sublayer of a stack only has the
/// embedding to read, so it needs no weights. A block of sublayers writes to one sum, which its first sublayer begins.
fn around(place: &LayerContext) -> ResidualSpec {
    let queries = queries(place);
    let weights = match place.number() {
        0 => None, // the first sublayer
        _ => weights(place, queries, |stem| place.numbered(stem)),
    };
    let begins_block = place.number() % place.options.get(&BLOCK) == 0;
    let mixing = Some(Mixing::Depth(DepthAttention { weights, begins_block }));
    match queries {
        1 => ResidualSpec { mixing, ..(PRENORM.around)(place) },
        _ => ResidualSpec { mixing, ..ResidualSpec::default() }, // `inside` declares the norms
    }
}

/// Returns the norms on the separate inputs of q, k and v, if three queries read these inputs.
fn inside(place: &LayerContext) -> Vec<(Point, Change)> {
    let norm = |name: &str| Change::Norm(place.projected_norm(name, place.model.d_model));
    match queries(place) {
        1 => Vec::new(),
        _ => Point::INPUTS.into_iter().zip(["q_input_norm", "k_input_norm", "v_input_norm"].map(norm)).collect(),
    }
}

/// Declares that the stack's output is an attention over all sublayers' outputs, with a norm after it.
fn stack(place: &LayerContext) -> StackSpec {
    let queries = 1;
    let weights = weights(place, queries, |stem| format!("end_{stem}"));
    StackSpec { mixing: Some(Mixing::Depth(DepthAttention { weights, begins_block: false })), ..(PRENORM.stack)(place) }
}

/// Declares the parameters of the attention over depth, with `queries` queries; `name` makes a parameter's full name
/// from its stem. Queries begin at 0, so that all outputs have equal weights.
fn weights(place: &LayerContext, queries: i64, name: impl Fn(&str) -> String) -> Option<DepthWeights> {
    let d = place.model.d_model;
    let shape = if queries == 1 { vec![d] } else { vec![queries, d] };
    let query = Learned::new(name("depth_query"), &shape, 0.0);
    let query = query.summed_over(match place.options.get(&FORM) {
        AttnResForm::Plain => SumsOver::Width,
        AttnResForm::Normed => SumsOver::RootWidth,
    });
    Some(match place.options.get(&FORM) {
        AttnResForm::Plain => DepthWeights::Plain(query, Learned::new(name("depth_gain"), &shape, 1.0)),
        AttnResForm::Normed => DepthWeights::Normed(query),
    })
}

/// Returns the number of queries with which this sublayer reads its input: the option's in self-attention, else 1.
fn queries(place: &LayerContext) -> i64 {
    if place.sublayer == Sublayer::SelfAttention {
        place.options.get(&QUERIES)
    } else {
        1
    }
}
