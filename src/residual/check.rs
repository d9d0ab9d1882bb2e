//! Checks of a user's declaration before it is built: names, widths, shapes, and reads of kept tensors.

use super::{Change, ExtraStream, Gain, LayerContext, LayerSpec, Learned, Mixing, NormAt, Point, StackSpec, Sublayer};
use super::{DepthWeights, Dynamic, FirstValue, Gates, ResidualSpec};
use crate::options::is_finite_in_f32;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;

type CheckResult = std::result::Result<(), String>;

/// Returns the error for a name that both a norm and a parameter have.
fn two_kinds(name: &str) -> String {
    format!("{name:?} is a norm and a parameter: give each its own name")
}

/// The names of a layer's own parts, which declarations cannot use.
const TAKEN: [&str; 9] =
    ["linear1", "linear2", "linear3", "self_attn", "multihead_attn", "activation", "dropout", "layers", "t"];

/// Errors, with the reason, if these declarations of a user cannot be built as the stack whose first sublayer has the
/// place `first`.
pub fn check(layers: &[LayerSpec], stack: &StackSpec, first: &LayerContext) -> CheckResult {
    let wanted = first.layers() as usize;
    let name = first.stack.name();
    if layers.len() != wanted {
        return Err(format!(
            "it declares {} layers of the {name}, and this model has {wanted}: declare it again for this model",
            layers.len()
        ));
    }
    // `walk` collects the names that the declarations introduce, and checks each declaration against them.
    let mut walk =
        Walk { first, stack, kept: BTreeMap::new(), norm_names: BTreeSet::new(), parameters: BTreeMap::new() };
    let d = first.model.d_model;
    walk.changes("the stack's begin", &stack.begin, d)?;
    // Each layer has names of its own. So the stack's names are set aside until the stack's end is checked.
    let stack_names = (take(&mut walk.norm_names), take(&mut walk.parameters));
    for (index, layer) in layers.iter().enumerate() {
        let place = LayerContext { layer: index as i64, ..*first };
        walk.layer(layer, &place).map_err(|why| format!("layer {index} of the {name}: {why}"))?;
    }
    (walk.norm_names, walk.parameters) = stack_names;
    walk.ends(layers.len() as i64)?;
    walk.changes("the stack's end", &stack.end, d)
}

/// A check of a stack's declarations, one after the other, with the names that those checked so far have introduced.
struct Walk<'a> {
    first: &'a LayerContext<'a>,
    stack: &'a StackSpec,
    /// The width of each kept tensor, by name.
    kept: BTreeMap<String, i64>,
    /// The names of the norms that belong to one owner: a layer, or the stack itself.
    norm_names: BTreeSet<String>,
    /// The parameters that belong to one owner, by name.
    parameters: BTreeMap<String, Learned>,
}

impl Walk<'_> {
    /// Checks the declaration of one layer. Its names belong to the layer alone, so they are cleared first.
    fn layer(&mut self, layer: &LayerSpec, place: &LayerContext) -> CheckResult {
        let (sublayers, wanted) = (layer.sublayers.len(), place.sublayers as usize);
        if sublayers != wanted {
            return Err(format!("it declares {sublayers} sublayers, and a layer here has {wanted}"));
        }
        self.norm_names.clear();
        self.parameters.clear();
        if !layer.begin.is_empty() && self.stack.mixing.is_some() {
            return Err("x is read of several tensors, so nothing can change it as the layer begins".into());
        }
        let d = place.model.d_model;
        self.changes("its begin", &layer.begin, d)?;
        for (place, sublayer) in place.each().zip(&layer.sublayers) {
            let within = |why| format!("{}: {why}", place.sublayer.name());
            self.sublayer(sublayer, &place).map_err(within)?;
        }
        Ok(())
    }

    /// Checks a sublayer: the changes around it and inside it, its gains, the streams beside x, and its mixing.
    fn sublayer(&mut self, sublayer: &super::SublayerSpec, place: &LayerContext) -> CheckResult {
        let ResidualSpec { before, skip, branch, after, alpha, beta, streams, mixing } = &sublayer.around;
        let d = place.model.d_model;
        self.changes("before", before, d)?;
        for (point, change) in &sublayer.inside {
            let widths = place.widths(*point).ok_or_else(|| format!("it has no point {point:?}"))?;
            let path = place.sublayer.path();
            // In decoding, a cross-attention's keys and values are made once, before the steps in which other layers
            // keep and mix tensors. So nothing can be kept or mixed there, nor at its queries.
            let is_qkv_of_cross_attention = place.sublayer == Sublayer::CrossAttention && point.is_before_products();
            if is_qkv_of_cross_attention && matches!(change, Change::Keep(_) | Change::Mix { .. }) {
                return Err(
                    "its keys and values are made once for all tokens: nothing can be kept or mixed there".into()
                );
            }
            // Parameters inside an attention belong to its module, so their names must begin with the module's path.
            // The path of a feed-forward is empty.
            self.change(&format!("{point:?}"), change, &widths, Some(path))?;
        }
        self.changes("branch", branch, d)?;
        self.changes("skip", skip, d)?;
        self.changes("after", after, d)?;
        let streams_gains = streams.iter().flat_map(|step| [&step.alpha, &step.beta]);
        for gain in [alpha, beta].into_iter().chain(streams_gains) {
            self.gain(gain, &[d])?;
            if *gain == Gain::Growing && self.stack.growth.is_none() {
                return Err("a gain grows, and the stack declares no growth".into());
            }
        }
        let (moved, wanted) = (streams.len(), self.stack.streams.len()); // numbers of streams beside x
        if moved != wanted {
            return Err(format!("it moves {moved} streams beside x, and the stack has {wanted}"));
        }
        if mixing.is_some() != self.stack.mixing.is_some() {
            return Err("the sublayers and the stack's end must all read of several tensors, or none".into());
        }
        if let Some(mixing) = mixing {
            // A mixing uses only these fields, so all others must have their defaults.
            let used = ResidualSpec {
                before: before.clone(),
                branch: branch.clone(),
                mixing: Some(mixing.clone()),
                ..ResidualSpec::default()
            };
            if sublayer.around != used {
                return Err(
                    "it reads of several tensors, so skip, after, alpha, beta and streams would do nothing".into()
                );
            }
            self.mixing(mixing, Some(place.sublayer))?;
            // Apart means that q, k and v have separate inputs.
            let has_input = sublayer.inside.iter().any(|(point, _)| *point == Point::Input);
            if mixing.reads_apart() && (!before.is_empty() || has_input) {
                return Err(
                    "q, k and v are read apart: what changes their inputs stands at query_input, key_input and value_input"
                        .into(),
                );
            }
            if mixing.reads_apart() && place.model.tensorized.is_some() {
                return Err("tensorized attention reads one input: give one query".into());
            }
        }
        Ok(())
    }

    /// Checks what the stack does between its layers and after them, apart from the changes at its end.
    fn ends(&mut self, layers: i64) -> CheckResult {
        let StackSpec { combine, streams, mixing, growth, .. } = self.stack;
        let d = self.first.model.d_model;
        if let Some(combine) = combine {
            let size = layers + 1;
            self.parameter("combine", &combine.weight, &[&[size, size]])?;
            if combine.norms.len() as i64 > layers {
                return Err(format!("combine has {} norms for {layers} layers", combine.norms.len()));
            }
            // The names of the weight and of the norms are prescribed: pair each prescribed name with the declared one.
            let norms = (1..).map(|l| format!("combine.norms.{l}")).zip(combine.norms.iter().map(|at| &at.name));
            let weight = ("combine.weight".to_string(), &combine.weight.name);
            if let Some((wanted, name)) = std::iter::once(weight).chain(norms).find(|(wanted, name)| wanted != *name) {
                return Err(format!("combine has {name:?} where {wanted:?} must stand"));
            }
            combine.norms.iter().try_for_each(|at| self.norm("combine", at, &[d], None))?;
        }
        for norm in streams.iter().filter_map(|ExtraStream { norm }| norm.as_ref()) {
            self.norm("a stream's end", norm, &[d], None)?;
        }
        if let Some(growth) = growth.filter(|growth| growth.steps < 0) {
            return Err(format!("growth takes at least 0 steps, got {}", growth.steps));
        }
        mixing.as_ref().map_or(Ok(()), |mixing| self.mixing(mixing, None))
    }

    /// Checks a mixing around the sublayer `at`, or at the stack's end if `at` is `None`.
    fn mixing(&mut self, mixing: &Mixing, at: Option<Sublayer>) -> CheckResult {
        match (mixing, &self.stack.mixing) {
            (Mixing::Hyper(hyper), Some(Mixing::Hyper(end))) => {
                let n = hyper.streams;
                if n < 1 || n != end.streams {
                    return Err(format!(
                        "hyper-connections need one number of streams, at least 1, got {n} and {}",
                        end.streams
                    ));
                }
                self.gates(&hyper.gates, n, at.is_none())
            }
            (Mixing::Depth(depth), Some(Mixing::Depth(_))) => {
                let d = self.first.model.d_model;
                // Only self-attention has inputs of its own for q, k and v, and only the normed form reads them apart.
                let may_be_three =
                    at == Some(Sublayer::SelfAttention) && matches!(depth.weights, Some(DepthWeights::Normed(_)));
                let shapes: &[&[i64]] = if may_be_three { &[&[d], &[3, d]] } else { &[&[d]] };
                mixing.parameters().into_iter().try_for_each(|weight| self.parameter("mixing", weight, shapes))
            }
            _ => Err("all sublayers and the stack's end must mix in the same way".into()),
        }
    }

    /// Checks the shapes and numbers of a hyper-connection's gates, for n streams around a sublayer or (`at_end`) at a
    /// stack's end. p are the gates of the read, g those of the write, and R mixes the streams.
    fn gates(&mut self, gates: &Gates, n: i64, at_end: bool) -> CheckResult {
        let d = self.first.model.d_model;
        let mut check_shape = |parameter: &Learned, shape: &[i64]| self.parameter("mixing", parameter, &[shape]);
        match gates {
            Gates::Joint { magnitude, .. } | Gates::Channel { magnitude, .. } if !is_finite_in_f32(*magnitude) => {
                Err(format!("a gate has the magnitude {magnitude:e}: it must be finite in float32"))
            }
            Gates::Joint { iterations, .. } if *iterations < 0 => {
                Err(format!("hyper-connections take at least 0 iterations, got {iterations}"))
            }
            Gates::Joint { weight, scale, bias, iterations, .. } => {
                // p has n rows of the weight, g has n and R has n²; s has one number for each of them.
                let (rows, scales) = match (at_end, iterations) {
                    (true, _) => (n, 1),
                    (false, 0) => (2 * n, 2),
                    (false, _) => (2 * n + n * n, 3),
                };
                check_shape(weight, &[rows, n * d])?;
                check_shape(scale, &[scales])?;
                check_shape(bias, &[rows])
            }
            Gates::Permuted { .. } if at_end => {
                Err("gates of permuted streams write too, so no stack can end with them".into())
            }
            Gates::Permuted { .. } if n > Gates::MOST_PERMUTED => Err(format!(
                "all permutations of {n} streams are too many: at most {} streams can be permuted",
                Gates::MOST_PERMUTED
            )),
            Gates::Permuted { gain, weight, scale, bias } => {
                let rows = 2 * n + Gates::permutations(n); // for p, for g, and for the weights of permutations
                check_shape(gain, &[n * d])?;
                check_shape(weight, &[rows, n * d])?;
                check_shape(scale, &[3])?;
                check_shape(bias, &[rows])
            }
            Gates::Each { .. } if at_end => Err("gates of each stream write too, so no stack can end with them".into()),
            Gates::Each { bias, dynamic } => {
                check_shape(bias, &[n * (n + 2)])?; // for each stream: p_i, a row of R, g_i
                let Some(Dynamic { gain, shift, weight, scale }) = dynamic else { return Ok(()) };
                [gain, shift].into_iter().try_for_each(|parameter| check_shape(parameter, &[d]))?;
                check_shape(weight, &[n + 2, d])?;
                check_shape(scale, &[2])
            }
            Gates::Channel { gain, down, up, write, .. } => {
                let rank = down.shape.first().copied().unwrap_or(1).max(1);
                check_shape(gain, &[n * d])?;
                check_shape(down, &[rank, n * d])?;
                check_shape(up, &[n * d, rank])?;
                match write {
                    Some(write) if !at_end => check_shape(write, &[n, n * d]),
                    None if at_end => Ok(()),
                    _ => Err("gates by channel need `write` around a sublayer, and none at a stack's end".into()),
                }
            }
            Gates::Sum(_) if !at_end => Err("a sum of streams writes nothing, so only a stack can end with it".into()),
            Gates::Sum(c) if !is_finite_in_f32(*c) => {
                Err(format!("a sum of streams has the number {c:e}: it must be finite in float32"))
            }
            Gates::Sum(_) => Ok(()),
        }
    }

    /// Checks changes outside an attention, of rows of this width. `at` names their place in messages.
    fn changes(&mut self, at: &str, changes: &[Change], width: i64) -> CheckResult {
        changes.iter().try_for_each(|change| self.change(at, change, &[width], None))
    }

    /// Checks a change; `at` names its place in messages. `widths` are the widths that a norm may have here. The first
    /// is the width of a head, if the rows are split into heads; the last is the width of the row. `path` is that of
    /// the attention around the change, `None` if there is none ([`check_path`](Self::check_path)).
    fn change(&mut self, at: &str, change: &Change, widths: &[i64], path: Option<&str>) -> CheckResult {
        let width = *widths.last().expect("rows have a width");
        match change {
            Change::Norm(norm) => self.norm(at, norm, widths, path),
            Change::Shift(parameter) | Change::Scale(parameter) => {
                self.check_path(&parameter.name, path)?;
                // The parameter may be a scalar, or as wide as a row, or as wide as a head if rows are split into
                // heads.
                let shapes: &[&[i64]] =
                    if widths.len() > 1 { &[&[1], &widths[..1], &[width]] } else { &[&[1], &[width]] };
                self.parameter(at, parameter, shapes)
            }
            // This change acts on whole rows, even if they are split into heads.
            Change::DampForward(parameter) => {
                self.check_path(&parameter.name, path)?;
                self.parameter(at, parameter, &[&[1], &[width]])
            }
            Change::HeadScale(parameter) => {
                if widths.len() > 1 {
                    return Err(format!("{at} is cut into heads, and head_scale acts where they are joined"));
                }
                self.check_path(&parameter.name, path)?;
                self.parameter(at, parameter, &[&[self.first.model.heads]])
            }
            Change::Times(c) | Change::Unit(c) => match is_finite_in_f32(*c) {
                true => Ok(()),
                false => Err(format!("{at} has the number {c:e}: it must be finite in float32")),
            },
            Change::Keep(name) => {
                self.kept.insert(name.clone(), width);
                Ok(())
            }
            Change::Mix { name, own, kept } => {
                let known: Vec<&str> = self.kept.keys().map(String::as_str).collect();
                match self.kept.get(name) {
                    None => {
                        return Err(format!("{at} mixes {name:?}, which nothing before has kept; kept are {known:?}"))
                    }
                    Some(other) if *other != width => {
                        return Err(format!("{at} mixes {name:?}, {other} wide, into {width}"));
                    }
                    Some(_) => {}
                }
                for gain in [own, kept] {
                    if *gain == Gain::Growing {
                        return Err(format!("{at} mixes by a gain that grows: only alpha and beta can grow"));
                    }
                    if let Some(parameter) = gain.learned() {
                        self.check_path(&parameter.name, path)?;
                    }
                    self.gain(gain, &[width])?;
                }
                Ok(())
            }
        }
    }

    /// Checks a gain: a constant, a temperature, or the shape of its parameter, which has one element or one of
    /// these widths.
    fn gain(&mut self, gain: &Gain, widths: &[i64]) -> CheckResult {
        match gain {
            Gain::Constant(c) if !is_finite_in_f32(*c) => Err(format!("a gain is {c:e}: it must be finite in float32")),
            Gain::Sigmoid { temperature, .. }
            | Gain::CoSigmoid { temperature, .. }
            | Gain::Magnitude { temperature, .. }
            | Gain::CoMagnitude { temperature, .. }
                if !(*temperature > 0.0 && is_finite_in_f32(*temperature)) =>
            {
                Err(format!("a gain's temperature must be above 0, got {temperature}"))
            }
            gain => match gain.learned() {
                Some(parameter) => {
                    // The parameter is a scalar, or has one number per column.
                    let shapes: Vec<[i64; 1]> = [1].iter().chain(widths).map(|width| [*width]).collect();
                    self.parameter(
                        "a gain",
                        parameter,
                        &shapes.iter().map(|shape| shape.as_slice()).collect::<Vec<_>>(),
                    )
                }
                None => Ok(()),
            },
        }
    }

    /// Checks a norm: its name, which must be new and begin with `path`, its initial value, and its width. `path` is
    /// that of the attention around the norm, `None` if there is none.
    fn norm(&mut self, at: &str, norm: &NormAt, widths: &[i64], path: Option<&str>) -> CheckResult {
        self.name(&norm.name)?;
        self.check_path(&norm.name, path)?;
        if !self.norm_names.insert(norm.name.clone()) {
            return Err(format!("two norms are called {:?}: give each its own name", norm.name));
        }
        if self.parameters.contains_key(&norm.name) {
            return Err(two_kinds(&norm.name));
        }
        if !is_finite_in_f32(norm.start) {
            return Err(format!("the norm {:?} starts at {:e}: it must be finite in float32", norm.name, norm.start));
        }
        match widths.contains(&norm.width) {
            true => Ok(()),
            false => Err(format!(
                "{at} has the norm {:?} of width {}, and rows there are {widths:?} wide",
                norm.name, norm.width
            )),
        }
    }

    /// Checks a parameter, which may have one of `shapes`; `at` names its place in messages. If its name occurs at
    /// several places, it is one parameter, so the declarations must be equal.
    fn parameter(&mut self, at: &str, parameter: &Learned, shapes: &[&[i64]]) -> CheckResult {
        let Learned { name, shape, value, .. } = parameter;
        self.name(name)?;
        if self.norm_names.contains(name) {
            return Err(two_kinds(name));
        }
        if !shapes.contains(&shape.as_slice()) {
            return Err(format!("{at} has {name:?} of shape {shape:?}, expected one of {shapes:?}"));
        }
        if let Some(other) = self.parameters.get(name).filter(|other| *other != parameter) {
            return Err(format!(
                "{name:?} is declared twice, of shape {:?} and {shape:?} or with other first values: one name is one parameter",
                other.shape
            ));
        }
        self.parameters.insert(name.clone(), parameter.clone());
        // `count` is the number of initial values, and `values` holds the numbers that must be finite. One value for
        // all elements always has the right count.
        let (count, values) = match value {
            FirstValue::All(value) => (shape.iter().product::<i64>(), std::slice::from_ref(value)),
            FirstValue::Each(values) => (values.len() as i64, values.as_slice()),
            FirstValue::Normal { normal } => (shape.iter().product::<i64>(), std::slice::from_ref(normal)),
        };
        if count != shape.iter().product::<i64>() {
            return Err(format!("{name:?} of shape {shape:?} has {count} first values"));
        }
        match values.iter().all(|value| is_finite_in_f32(*value)) {
            true => Ok(()),
            false => Err(format!("{name:?} starts at numbers that are not finite in float32")),
        }
    }

    /// Errors if a name has other characters than letters, digits and _ between dots, or is the name of a layer's
    /// part.
    fn name(&self, name: &str) -> CheckResult {
        let is_word = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        match name.split('.').all(is_word) {
            true if TAKEN.contains(&name) => {
                Err(format!("{name:?} is the name of a part of every layer: give it another"))
            }
            true => Ok(()),
            false => Err(format!("{name:?} is no name: it needs letters, digits and _")),
        }
    }

    /// Errors if the name of an attention's part does not begin with the attention's path. Outside an attention `path`
    /// is `None`.
    fn check_path(&self, name: &str, path: Option<&str>) -> CheckResult {
        match path {
            Some(path) if !name.starts_with(path) => {
                Err(format!("{name:?} stands inside {path:?}, so it must begin with that"))
            }
            _ => Ok(()),
        }
    }
}

impl LayerContext<'_> {
    /// Returns the widths that a norm may have at a point: first a head's, if the rows are split into heads, and last
    /// the row's. Returns `None` if the sublayer has no such point.
    fn widths(&self, point: Point) -> Option<Vec<i64>> {
        let (d, is_attention) = (self.model.d_model, self.sublayer != Sublayer::FeedForward);
        match point {
            Point::Input => Some(vec![d]),
            Point::QueryInput | Point::KeyInput | Point::ValueInput => {
                // Only plain self-attention can have separate inputs for q, k and v.
                let has_inputs = self.sublayer == Sublayer::SelfAttention && self.model.tensorized.is_none();
                has_inputs.then(|| vec![d])
            }
            // Cross-attention does not rotate queries and keys.
            Point::RotatedQuery | Point::RotatedKey if self.sublayer == Sublayer::CrossAttention => None,
            Point::Query | Point::RotatedQuery if is_attention => Some(vec![self.d_head(), d]),
            Point::Key | Point::Value | Point::RotatedKey if is_attention => Some(vec![self.d_head(), self.kv_width()]),
            Point::AfterHeads | Point::AfterOutput if is_attention => Some(vec![d]),
            Point::BeforeActivation | Point::AfterActivation if !is_attention => Some(vec![self.model.d_ff]),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::given::GivenScheme;
    use super::super::{option_specs, ModelShape, StackName, SCHEMES};
    use crate::options::Options;
    use crate::residual::LayerContext;
    use serde_json::json;

    #[test]
    fn the_tables_schemes_pass_also_said_as_data() {
        let model = ModelShape {
            encoder_layers: 3,
            decoder_layers: 2,
            heads: 2,
            d_model: 4,
            d_ff: 6,
            kv_heads: 2,
            ..ModelShape::SMALL
        };
        let option_sets = [
            json!({}),
            json!({"mhc_mixing": "none", "attnres_form": "normed", "hyper_connections_dynamic": false}),
            json!({"mhc_mixing": "channel", "mhc_rank": 3, "attnres_form": "normed", "attnres_queries": 3}),
            json!({"mhc_mixing": "channel", "mhc_end": "mean", "mhc_magnitude": 1.5}),
        ];
        for (scheme, set) in SCHEMES.iter().flat_map(|scheme| option_sets.iter().map(move |set| (scheme, set))) {
            let mut options = Options::default();
            for option in option_specs().iter().filter(|option| set.get(option.name()).is_some()) {
                options.set(*option, set[option.name()].clone()).unwrap();
            }
            for stack in [StackName::Encoder, StackName::Decoder] {
                let first = LayerContext::new(model, &options, stack, 0);
                let given = GivenScheme::of(scheme, "again", &first);
                let result = given.check(&first);
                assert!(result.is_ok(), "{}: {result:?}", scheme.name);
                let text = serde_json::to_string(&given).unwrap();
                assert_eq!(serde_json::from_str::<GivenScheme>(&text).unwrap(), given, "{}", scheme.name);
            }
        }
    }
}
