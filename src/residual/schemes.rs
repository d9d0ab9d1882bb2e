//! The schemes of the layers in a stack: one name for all layers, or several names, each for some layers from the
//! bottom up.
//!
//! `postnorm*3,prenorm` has PostNorm in the first three layers of a stack and PreNorm in the others;
//! `postnorm*1/4,prenorm` has PostNorm in the first quarter, rounded down (Mix-LN, Li et al. 2024).

use super::GivenScheme;
use super::{
    Change, LayerContext, LayerSpec, Learned, ModelShape, NormAt, NormOver, Point, ResidualSpec, Scheme, StackName,
    StackSpec, Sublayer, SublayerSpec, ValueNorm, SCHEMES,
};
use crate::error::{unknown, Error, Result};
use crate::options::{AnyOption, Options};
use std::fmt;
use std::sync::Arc;

/// The ε with which queries and keys are scaled to length 1, as in torch's `normalize`.
const UNIT_EPS: f64 = 1e-12;

/// The schemes of a stack's layers, from the bottom up. All layers above those of `first` have the scheme `last`.
#[derive(Clone, Debug, PartialEq)]
pub struct Schemes {
    first: Vec<(SchemeRef, Share)>,
    last: SchemeRef,
}

/// A built-in scheme, or one that a user declares.
#[derive(Clone)]
pub enum SchemeRef {
    Table(&'static Scheme),
    Given(Arc<GivenScheme>),
}

impl SchemeRef {
    /// Returns the name by which a configuration refers to the scheme.
    pub fn name(&self) -> &str {
        match self {
            SchemeRef::Table(scheme) => scheme.name,
            SchemeRef::Given(scheme) => &scheme.name,
        }
    }

    /// Errors if an option of the scheme is set, but has no effect because of the scheme's other options.
    pub fn check_options(&self, options: &Options) -> Result<()> {
        match self {
            SchemeRef::Table(scheme) => (scheme.check)(options),
            SchemeRef::Given(_) => Ok(()),
        }
    }

    /// Returns the options of a built-in scheme; a user's scheme has none.
    pub fn options(&self) -> &'static [&'static dyn AnyOption] {
        match self {
            SchemeRef::Table(scheme) => scheme.options,
            SchemeRef::Given(_) => &[],
        }
    }

    /// Returns the name of the scheme's default initialisation.
    fn init(&self) -> &str {
        match self {
            SchemeRef::Table(scheme) => scheme.init,
            SchemeRef::Given(scheme) => &scheme.init,
        }
    }

    /// Returns the residual connection around the sublayer at this place.
    pub fn around(&self, place: &LayerContext) -> ResidualSpec {
        match self {
            SchemeRef::Table(scheme) => (scheme.around)(place),
            SchemeRef::Given(scheme) => {
                scheme.sublayer_at(place).map(|sublayer| sublayer.around.clone()).unwrap_or_default()
            }
        }
    }

    /// Returns the changes inside the sublayer at this place, each with its point.
    pub fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        match self {
            SchemeRef::Table(scheme) => (scheme.inside)(place),
            SchemeRef::Given(scheme) => {
                scheme.sublayer_at(place).map(|sublayer| sublayer.inside.clone()).unwrap_or_default()
            }
        }
    }

    /// Returns the changes of x at the beginning of the layer at this place.
    fn layer(&self, place: &LayerContext) -> Vec<Change> {
        match self {
            SchemeRef::Table(scheme) => (scheme.layer)(place),
            SchemeRef::Given(scheme) => scheme.layer_at(place).map(|layer| layer.begin.clone()).unwrap_or_default(),
        }
    }

    /// Returns the parts that belong to this place's whole stack.
    fn stack(&self, place: &LayerContext) -> StackSpec {
        match self {
            SchemeRef::Table(scheme) => (scheme.stack)(place),
            SchemeRef::Given(scheme) => scheme.stack_at(place).cloned().unwrap_or_default(),
        }
    }

    /// True if linear layers have biases in models with this scheme.
    fn has_biases(&self) -> bool {
        match self {
            SchemeRef::Table(scheme) => scheme.has_biases,
            SchemeRef::Given(scheme) => scheme.has_biases,
        }
    }

    /// True if profiling on the first batch sets the gains of x.
    fn is_profiled(&self) -> bool {
        match self {
            SchemeRef::Table(scheme) => scheme.is_profiled,
            SchemeRef::Given(scheme) => scheme.is_profiled,
        }
    }

    /// True if the scheme keeps vectors at length 1.
    pub fn is_on_sphere(&self) -> bool {
        match self {
            SchemeRef::Table(scheme) => scheme.on_sphere,
            SchemeRef::Given(_) => false,
        }
    }

    /// Returns why the residual stream is not a plain sum of branch outputs; `None` if it is one.
    fn own_depth(&self) -> Option<&'static str> {
        match self {
            SchemeRef::Table(scheme) => scheme.own_depth,
            SchemeRef::Given(_) => None,
        }
    }
}

impl PartialEq for SchemeRef {
    /// Compares built-in schemes by their unique names, because they hold functions, which cannot be compared.
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (SchemeRef::Table(left), SchemeRef::Table(right)) => left.name == right.name,
            (SchemeRef::Given(left), SchemeRef::Given(right)) => left == right,
            _ => false,
        }
    }
}

impl fmt::Debug for SchemeRef {
    /// Writes the scheme's name.
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How many layers of a stack have a scheme.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Share {
    Layers(i64),
    /// A fraction of the stack's layers, rounded down.
    Fraction(i64, i64),
}

impl Share {
    /// Returns how many layers this share is in a stack of `layers` layers.
    fn of(self, layers: i64) -> i64 {
        match self {
            Share::Layers(count) => count,
            Share::Fraction(part, whole) => layers * part / whole,
        }
    }

    /// Parses a number of layers such as `3`, or a fraction such as `1/4`.
    fn parse(text: &str) -> Option<Self> {
        let share = match text.split_once('/') {
            Some((part, whole)) => Share::Fraction(part.parse().ok()?, whole.parse().ok()?),
            None => Share::Layers(text.parse().ok()?),
        };
        // The bounds of 2³¹ keep `layers * part` within an i64, which [`of`](Self::of) computes.
        let is_sound = match share {
            Share::Layers(count) => (1..1 << 31).contains(&count),
            Share::Fraction(part, whole) => 0 < part && part < whole && whole < 1 << 31,
        };
        is_sound.then_some(share)
    }
}

impl Schemes {
    /// Returns schemes that use `last` in every layer.
    pub fn of(last: SchemeRef) -> Self {
        Schemes { first: Vec::new(), last }
    }

    /// Returns schemes that use a user's scheme in every layer.
    pub fn given(scheme: GivenScheme) -> Result<Self> {
        scheme.check_name()?;
        Ok(Schemes::of(SchemeRef::Given(Arc::new(scheme))))
    }

    /// Returns the user's declaration; `None` if the schemes are built in.
    pub fn as_given(&self) -> Option<&GivenScheme> {
        match &self.last {
            SchemeRef::Table(_) => None,
            SchemeRef::Given(scheme) => Some(scheme),
        }
    }

    /// Parses one scheme (`name`), or several with their shares of layers (`name*layers,…,name`).
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |why: String| Error::invalid(format!("residual {text:?}: {why}, as in postnorm*3,prenorm"));
        let (first, last) = text.rsplit_once(',').unwrap_or(("", text));
        if let Some((name, _)) = last.split_once('*') {
            return Err(wrong(format!("the last scheme has the layers that are left, so write {name} alone")));
        }
        let mut schemes = Schemes::of(SchemeRef::Table(find(last)?));
        // Without a comma `first` is empty, and has no parts.
        for part in first.split(',').filter(|_| !first.is_empty()) {
            let (name, share) = part.split_once('*').unwrap_or((part, "")); // an empty share is refused
            let scheme = find(name)?;
            let share = Share::parse(share).ok_or_else(|| {
                wrong(format!("{name} needs a number of layers (*3) or a part of them (*1/4), got {part:?}"))
            })?;
            schemes.first.push((SchemeRef::Table(scheme), share));
        }
        // A stack has only one schedule of α_t, so all schemes that have a gain that grows must agree.
        let growths: Vec<_> =
            schemes.all().filter_map(|scheme| Some((scheme.name(), grows_by_layer(scheme)?))).collect();
        if let Some((other, _)) = growths.iter().find(|(_, by_layer)| *by_layer != growths[0].1) {
            let first = growths[0].0;
            return Err(wrong(format!("{first} and {other} let branches grow in different ways, so take one of them")));
        }
        let unmixable = schemes.all().find(|scheme| !can_be_mixed(scheme)).map(|scheme| scheme.name().to_string());
        match unmixable.filter(|_| !schemes.first.is_empty()) {
            Some(scheme) => Err(Error::invalid(format!(
                "residual {text:?}: {scheme} changes more than single layers, so it must have all of them",
            ))),
            None => Ok(schemes),
        }
    }

    /// Iterates over the schemes, from the lowest layer's upwards.
    pub fn all(&self) -> impl Iterator<Item = &SchemeRef> {
        self.first.iter().map(|(scheme, _)| scheme).chain([&self.last])
    }

    /// Returns the scheme of the layer at this place.
    pub fn at(&self, place: &LayerContext) -> &SchemeRef {
        let mut below = 0; // the number of layers from the bottom up to the last one of `scheme`
        for (scheme, share) in &self.first {
            below += share.of(place.layers());
            if place.layer < below {
                return scheme;
            }
        }
        &self.last
    }

    /// Returns the declarations of all layers in this place's stack, from the bottom up.
    pub fn layers(&self, place: &LayerContext) -> Vec<LayerSpec> {
        (0..place.layers()).map(|layer| self.layer(&LayerContext { layer, ..*place })).collect()
    }

    /// Returns the declaration of the layer at this place, with the factors of F(x) that the parametrisation sets.
    pub fn layer(&self, place: &LayerContext) -> LayerSpec {
        let scheme = self.at(place);
        let sublayers = place.each().map(|place| {
            let around = scheme.around(&place);
            let (around, scale) = match place.model.scaled.unit {
                // u-μP sets both gains, and leaves no factor to multiply F(x) by.
                Some(unit) => (around.with_gains(unit.gains(place.number())), 1.0),
                None => around.times(place.model.scaled.branch(place.layers())),
            };
            SublayerSpec { around, inside: self.inside(&place), scale }
        });
        LayerSpec { begin: scheme.layer(place), sublayers: sublayers.collect() }
    }

    /// Returns the changes inside the sublayer at this place. They come from the scheme of its layer, from the
    /// model's norms on queries, keys and values, and from `qk_l2norm`, which scales queries and keys to length 1 and
    /// multiplies scores by a learned factor (Henry et al. 2020).
    fn inside(&self, place: &LayerContext) -> Vec<(Point, Change)> {
        let mut inside = self.at(place).inside(place);
        if place.sublayer == Sublayer::FeedForward {
            return inside;
        }
        inside.extend(qk_norm(place));
        if let Some(kind) = place.model.v_norm {
            let is_weighted = kind == ValueNorm::Weighted;
            let norm = NormAt { is_weighted, ..place.projected_norm("v_norm", place.d_head()) };
            inside.push((Point::Value, Change::Norm(norm)));
        }
        if let Some(length) = place.model.qk_l2norm {
            let (unit, length) = (Change::Unit(UNIT_EPS), length as f64);
            let start = (length * length - length).log2(); // the paper's initial factor for texts of this length
            let factor = Learned::new(place.path_of("qk_scale"), &[1], start);
            // The learned factor replaces attention's own factor of scores, which is divided out here.
            let undo_scale = Change::Times(place.model.scaled.scores(place.d_head()).recip());
            inside.extend([(Point::Query, unit.clone()), (Point::Query, Change::Scale(factor))]);
            inside.extend([(Point::Query, undo_scale), (Point::Key, unit)]);
        }
        inside
    }

    /// Returns the parts that belong to this place's whole stack. `begin` is from the first layer's scheme, `growth`
    /// from the first scheme that has one. All other parts are from the last layer's scheme.
    pub fn flow(&self, place: &LayerContext) -> StackSpec {
        let [bottom, top] =
            [0, place.layers() - 1].map(|layer| self.at(&LayerContext { layer, ..*place }).stack(place));
        let growth = self.all().find_map(|scheme| scheme.stack(place).growth);
        StackSpec { growth, begin: bottom.begin, ..top }
    }

    /// Returns the default initialisation of the schemes, or xavier if they have different ones.
    pub fn init(&self) -> &str {
        let init = self.last.init();
        if self.all().all(|scheme| scheme.init() == init) {
            init
        } else {
            "xavier"
        }
    }

    /// True if linear layers have biases under these schemes.
    pub fn has_biases(&self) -> bool {
        self.last.has_biases()
    }

    /// Returns the name and the reason of the first scheme with a [`Scheme::own_depth`].
    pub fn own_depth(&self) -> Option<(&str, &'static str)> {
        self.all().find_map(|scheme| Some((scheme.name(), scheme.own_depth()?)))
    }

    /// True if profiling on the first batch sets the gains of x.
    pub fn is_profiled(&self) -> bool {
        self.last.is_profiled()
    }

    /// True if any of the schemes has a norm anywhere in a model of this shape.
    pub fn have_norms(&self, model: ModelShape, options: &Options) -> bool {
        let place = LayerContext::new(model, options, StackName::Decoder, 0);
        self.all().any(|scheme| puts_norms(scheme, &place))
    }

    /// Errors if a user's declarations do not fit the model. `kinds` are the sublayers of the model's layers, if
    /// these differ from the stack's.
    pub fn check_given(&self, model: ModelShape, options: &Options, kinds: &[Sublayer]) -> Result<()> {
        let Some(given) = self.as_given() else { return Ok(()) };
        StackName::of(&model).iter().try_for_each(|stack| {
            let first = LayerContext::new(model, options, *stack, 0);
            given.check(&first.of_block(kinds).unwrap_or(first))
        })
    }

    /// Errors if the schemes need more layers than the model's stacks have. `residual` is the text from which the
    /// schemes were parsed.
    pub fn check(&self, residual: &str, model: &ModelShape) -> Result<()> {
        let stacks = [("encoder_layers", model.encoder_layers), ("decoder_layers", model.decoder_layers)];
        // Without an encoder, the first entry is skipped.
        for (name, layers) in stacks.into_iter().skip(usize::from(!model.has_encoder)) {
            // The last scheme needs a layer of its own if there are others.
            let taken: i64 = self.first.iter().map(|(_, share)| share.of(layers)).sum();
            if taken > layers || (taken == layers && !self.first.is_empty()) {
                return Err(Error::invalid(format!(
                    "residual {residual:?} gives {taken} of {name} = {layers} layers away and leaves none to {}: give fewer",
                    self.last.name()
                )));
            }
        }
        Ok(())
    }
}

/// Returns the norms that the option `qk_norm` adds to an attention's queries and keys, and the factor by which the
/// results are multiplied. Returns nothing without the option.
fn qk_norm(place: &LayerContext) -> Vec<(Point, Change)> {
    let Some(how) = place.model.qk_norm else { return Vec::new() };
    let points = match how.after_rotation && place.sublayer == Sublayer::SelfAttention {
        true => [Point::RotatedQuery, Point::RotatedKey],
        false => [Point::Query, Point::Key],
    };
    let widths = match how.over {
        NormOver::Head => [place.d_head(); 2],
        NormOver::AllHeads => [place.model.d_model, place.kv_width()],
    };
    let norm = |(name, width)| NormAt { is_weighted: how.is_weighted, ..place.projected_norm(name, width) };
    let norms = ["q_norm", "k_norm"].into_iter().zip(widths).map(norm);
    let mut changes = Vec::new();
    for (point, norm) in points.into_iter().zip(norms) {
        changes.push((point, Change::Norm(norm)));
        if how.scale != 1.0 {
            changes.push((point, Change::Times(how.scale)));
        }
    }
    changes
}

/// Returns the built-in scheme of this name.
fn find(name: &str) -> Result<&'static Scheme> {
    SCHEMES
        .iter()
        .copied()
        .find(|s| s.name == name)
        .ok_or_else(|| unknown("residual", name, SCHEMES.iter().map(|s| s.name)))
}

/// True if the scheme declares a norm anywhere: around or inside a sublayer, in a layer, or in the stack.
fn puts_norms(scheme: &SchemeRef, place: &LayerContext) -> bool {
    let is_norm = |change: &Change| change.norm().is_some();
    let has_norm = |place: LayerContext| {
        scheme.around(&place).changes().any(is_norm) || scheme.inside(&place).iter().any(|(_, change)| is_norm(change))
    };
    let (layer, stack) = (scheme.layer(place), scheme.stack(place));
    let is_combine_normed = stack.combine.is_some_and(|combine| !combine.norms.is_empty());
    let is_stream_normed = stack.streams.iter().any(|stream| stream.norm.is_some());
    let is_stack_normed = stack.begin.iter().chain(&layer).chain(&stack.end).any(is_norm);
    place.each().any(has_norm) || is_combine_normed || is_stream_normed || is_stack_normed
}

/// Returns true if each layer has its own α_t, and false if all share one; `None` if the scheme has no gain that
/// grows.
fn grows_by_layer(scheme: &SchemeRef) -> Option<bool> {
    let options = Options::default();
    let flow = scheme.stack(&LayerContext::new(ModelShape::SMALL, &options, StackName::Encoder, 0));
    flow.growth.map(|growth| growth.by_layer)
}

/// True if a stack may have layers of this scheme and layers of others: the scheme has no streams beside x, and
/// nothing that belongs to the whole model.
fn can_be_mixed(scheme: &SchemeRef) -> bool {
    let options = Options::default();
    let flow = scheme.stack(&LayerContext::new(ModelShape::SMALL, &options, StackName::Encoder, 0));
    flow.combine.is_none()
        && flow.streams.is_empty()
        && flow.mixing.is_none()
        && scheme.has_biases()
        && !scheme.is_profiled()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the name of each layer's scheme in a decoder with this many layers.
    fn names(text: &str, layers: i64) -> Vec<String> {
        let (model, options) = (ModelShape { decoder_layers: layers, ..ModelShape::SMALL }, Options::default());
        let (schemes, place) =
            (Schemes::parse(text).unwrap(), LayerContext::new(model, &options, StackName::Decoder, 0));
        (0..layers).map(|layer| schemes.at(&LayerContext { layer, ..place }).name().to_string()).collect()
    }

    #[test]
    fn layers_are_counted_from_the_bottom() {
        assert_eq!(names("deepnorm", 2), ["deepnorm", "deepnorm"]);
        assert_eq!(names("postnorm*2,sandwich*1,prenorm", 4), ["postnorm", "postnorm", "sandwich", "prenorm"]);
        assert_eq!(names("postnorm*1/4,prenorm", 7), [&["postnorm"][..], &["prenorm"; 6]].concat());
        assert_eq!(names("postnorm*1/4,prenorm", 3), ["prenorm"; 3]);
    }

    #[test]
    fn the_outer_layers_begin_and_end_the_stack() {
        let (model, options) = (ModelShape { decoder_layers: 6, ..ModelShape::SMALL }, Options::default());
        let place = LayerContext::new(model, &options, StackName::Decoder, 0);
        let flow = |text: &str| Schemes::parse(text).unwrap().flow(&place);
        assert_eq!(flow("branchnorm*1,prenorm"), StackSpec { growth: flow("branchnorm").growth, ..flow("prenorm") });
        assert_eq!(flow("prenorm*1,postnorm"), flow("postnorm"));
        assert_eq!(flow("peri-ln*1,postnorm"), StackSpec { begin: flow("peri-ln").begin, ..flow("postnorm") });
        assert_eq!(flow("postnorm*1,peri-ln"), flow("prenorm"));
        assert_eq!(flow("prenorm*1/2,postnorm*6,prenorm"), flow("postnorm"), "no layer is left to prenorm");
        assert_eq!(Schemes::parse("postnorm*1,prenorm").unwrap().init(), "smallinit");
        assert_eq!(Schemes::parse("postnorm*1,deepnorm").unwrap().init(), "xavier");
    }

    #[test]
    fn wrong_rows_say_why() {
        for (text, why) in [
            ("postnrom*1,prenorm", "did you mean \"postnorm\""),
            ("postnorm*1,prenorm*2", "so write prenorm alone"),
            ("postnorm,prenorm", "postnorm needs a number of layers"),
            ("postnorm*0,prenorm", "got \"postnorm*0\""),
            ("postnorm*3/2,prenorm", "got \"postnorm*3/2\""),
            ("dlcl*1,prenorm", "dlcl changes more than single layers"),
            ("prenorm*1,resi-dual", "resi-dual changes more"),
            ("admin*1,postnorm", "admin changes more"),
            ("branchnorm*1,prores", "branchnorm and prores let branches grow in different ways"),
            ("", "unknown residual"),
        ] {
            let e = Schemes::parse(text).expect_err(text).to_string();
            assert!(e.contains(why), "{text}: {e}");
        }
        let model = ModelShape { encoder_layers: 2, decoder_layers: 3, ..ModelShape::SMALL };
        let check = |text: &str| Schemes::parse(text).unwrap().check(text, &model);
        let e = check("postnorm*2,prenorm").unwrap_err().to_string();
        assert!(e.contains("2 of encoder_layers = 2"), "{e}");
        check("postnorm*1,prenorm").unwrap();
    }
}
