//! A stack of layers, as the encoder and the decoder are.

use super::attention::{Attention, Cache};
use super::layer::{Layer, Streams, SublayerFunction};
use super::norm::Norm;
use super::residual::{BuiltEnds, Inside};
use super::tensorized::Tensorized;
use super::{Builder, Context, Ranges, Reads};
use crate::error::{Error, Result};
use crate::host::host;
use crate::init::Init;
use crate::operator;
use crate::residual::{Change, LayerContext, Schemes};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use tch::{Kind, Tensor};

pub struct Stack {
    body: Rc<Body>,
}

struct Body {
    layers: Vec<Layer>,
    flow: BuiltEnds,
}

/// Per layer, the keys and values of what has been decoded, and which of their rows each hypothesis reads.
#[derive(Default)]
pub struct StackCache {
    layers: Vec<Option<Cache>>,
    /// Rows that have been written.
    length: usize,
    /// From so many rows on, those that nobody reads are looked for.
    full: usize,
    reads: Reads,
}

impl StackCache {
    /// Slot i becomes what slot order[i] was; order may be shorter or longer than the cache.
    pub fn reorder(&mut self, order: &Tensor) -> Result<()> {
        self.reads = self.reads.select(&host::<i64>("order", order)?);
        self.compact()
    }

    /// Which rows each slot has written.
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Other slots, which have written rows of this cache. Rows that only the former ones read stay, until
    /// [`compact`](Self::compact).
    pub fn set_reads(&mut self, reads: Reads) {
        self.reads = reads;
    }

    /// Drops the rows that no slot reads once they are half of all, so that the cache has at most four times the rows
    /// that it needs, or [`SMALL`](Self::SMALL).
    pub fn compact(&mut self) -> Result<()> {
        if self.length < self.full.max(Self::SMALL) {
            return Ok(());
        }
        let (kept, reads) = self.reads.compacted(self.length);
        if 2 * kept.len() <= self.length {
            (self.length, self.reads) = (kept.len(), reads);
            let kept = Tensor::f_from_slice(&kept)?;
            for cache in self.layers.iter_mut().flatten() {
                cache.keep(&kept.f_to_device(cache.device())?)?;
            }
        }
        self.full = 2 * self.length;
        Ok(())
    }

    /// Rows of keys and values in each layer.
    #[cfg(test)]
    pub fn rows(&self) -> usize {
        self.length
    }

    /// Rows that are not worth looking at.
    const SMALL: usize = 1024;
}

/// Per layer, the encoder output's keys and values.
pub type StackMemory = Vec<(Tensor, Tensor)>;

impl Stack {
    /// `place` says which stack.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init, schemes: &Schemes) -> Result<Self> {
        let flow = schemes.flow(place);
        let has_biases = schemes.has_biases() && place.model.has_biases;
        // Layer by layer: a forged configuration's thousands are refused at the first whose weights are missing.
        let mut layers = b.within("layers", |b| {
            let layer = |layer| {
                let place = LayerContext { layer, ..*place };
                b.within(&layer.to_string(), |b| Layer::build(b, &place, init, has_biases, &schemes.layer(&place)))
            };
            (0..place.layers()).map(layer).collect::<Result<Vec<_>>>()
        })?;
        let mut needed: BTreeSet<String> = flow.end.iter().filter_map(Change::mixes).map(String::from).collect();
        for layer in layers.iter_mut().rev() {
            layer.leaves.retain(|name| needed.contains(name));
            needed.extend(layer.takes.iter().cloned());
        }
        let flow = BuiltEnds::build(b, place, &flow)?;
        Ok(Stack { body: Rc::new(Body { layers, flow }) })
    }

    /// Whole sentences: x (rows, d), every sentence to itself (`causal`: to its past), and to the memory if there is one.
    pub fn forward(
        &self,
        x: Tensor,
        own: &Ranges,
        causal: bool,
        memory: Option<(&Tensor, &Ranges)>,
        ctx: &Context,
    ) -> Result<Tensor> {
        self.run(x, ctx, &mut |index, streams| match ctx.recompute {
            true => self.recomputed(index, streams, own, causal, memory, ctx),
            false => self.body.layer(index, streams, ctx, &mut whole(own, causal, memory, ctx)),
        })
    }

    /// Keys and values of an encoder output, for [`step`](Self::step).
    pub fn memory(&self, memory: &Tensor, ctx: &Context) -> Result<StackMemory> {
        self.body
            .layers
            .iter()
            .flat_map(|layer| &layer.sublayers)
            .filter_map(|s| match &s.function {
                SublayerFunction::CrossAttention(attention) => Some(attention.memory(memory, &s.inside, ctx)),
                _ => None,
            })
            .collect()
    }

    /// New slots behind the cache's: all their tokens at once, x (rows, d), slot after slot as `offsets` says; `own` has
    /// the same for attention. The stack reads no memory.
    pub fn begin(
        &self,
        x: Tensor,
        own: &Ranges,
        offsets: &[i64],
        cache: &mut StackCache,
        ctx: &Context,
    ) -> Result<Tensor> {
        cache.layers.resize_with(self.body.layers.len(), || None);
        let at = cache.length;
        let rows = offsets.windows(2).map(|ends| at as i64 + ends[0]..at as i64 + ends[1]);
        cache.reads = std::mem::take(&mut cache.reads).joined(&Reads::ranges(rows));
        cache.length += x.size()[0] as usize;
        self.run(x, ctx, &mut |index, streams| {
            let cache = &mut cache.layers[index];
            self.body.layer(index, streams, ctx, &mut |attention, inside, input| match attention {
                Attends::Itself(attention) => attention.begin(input, cache, at, own, inside, ctx),
                Attends::Memory(_) => Err(Error::invalid("a decoder that reads an encoder decodes token by token")),
                Attends::Segment(_) => Err(no_steps()),
            })
        })
    }

    /// One more token of every hypothesis: x (slots, d). An empty cache gets as many slots. `memory`: which of its rows
    /// each slot reads.
    pub fn step(
        &self,
        x: Tensor,
        cache: &mut StackCache,
        memory: Option<(&StackMemory, &Reads)>,
        ctx: &Context,
    ) -> Result<Tensor> {
        let slots = x.size()[0] as usize;
        if cache.length == 0 {
            cache.reads = Reads::nothing(slots);
        }
        if cache.reads.queries() != slots {
            let kept = cache.reads.queries();
            return Err(Error::invalid(format!("the cache has {kept} slots, but {slots} tokens are to be added")));
        }
        cache.layers.resize_with(self.body.layers.len(), || None);
        let at = cache.length;
        (cache.reads, cache.length) = (cache.reads.followed_by(at), at + slots);
        self.run(x, ctx, &mut |index, streams| {
            let StackCache { layers, reads, .. } = &mut *cache;
            let cache = &mut layers[index];
            self.body.layer(index, streams, ctx, &mut |attention, inside, input| match (attention, memory) {
                (Attends::Memory(attention), Some((memory, reads))) => {
                    attention.read_memory(input, &memory[index], reads, inside, ctx)
                }
                (Attends::Itself(attention) | Attends::Memory(attention), _) => {
                    attention.step(input, cache, at, reads, inside, ctx)
                }
                (Attends::Segment(_), _) => Err(no_steps()),
            })
        })
    }

    #[cfg(test)]
    pub fn layers(&self) -> &[Layer] {
        &self.body.layers
    }

    /// All layers, one after the other.
    fn run(
        &self,
        x: Tensor,
        ctx: &Context,
        layer: &mut dyn FnMut(usize, Streams) -> Result<Streams>,
    ) -> Result<Tensor> {
        let Body { layers, flow } = &*self.body;
        let kind = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        ctx.kept_tensors().borrow_mut().clear();
        let x = flow.enter(x, ctx)?;
        let deviation = ctx.profile.then(|| Tensor::f_ones([1i64].as_slice(), (kind, x.device()))).transpose()?;
        ctx.show(|watch| watch.stack(&x))?;
        let (x, others) = flow.begin(x)?;
        let beside = others.len();
        let mut streams = Streams::of([x].into_iter().chain(others), beside, None);
        streams.deviation = deviation;
        let (alphas, mut outputs) = (flow.alphas(layers.len(), kind)?, vec![]);
        for index in 0..layers.len() {
            streams.alpha_t = alphas.get(index).map(Tensor::shallow_clone);
            if let Some(combine) = &flow.combine {
                streams = Streams { x: combine.next(streams.x, &mut outputs, ctx)?, normed: None, ..streams };
            }
            let passing = self.give(index, ctx)?;
            streams = match layers[index].keeps(&streams) {
                0 => layer(index, streams)?,
                kept => {
                    let after = layer(index, streams.viewed()?)?;
                    streams.followed_by(kept, after)
                }
            };
            self.take(index, passing, ctx);
            ctx.show(|watch| watch.layer(&flow.seen(&streams.x, &streams.others)?))?;
        }
        if let Some(combine) = &flow.combine {
            streams = Streams { x: combine.next(streams.x, &mut outputs, ctx)?, normed: None, ..streams };
        }
        match streams.normed {
            Some(normed) => Ok(normed),
            None => flow.finish(streams.x, streams.others, ctx),
        }
    }

    /// Puts views of what the layer reads of others under their names, and returns what was kept. Autograd adds up
    /// what one layer gives to each before it adds that to others', as with [`Streams::viewed`].
    fn give(&self, index: usize, ctx: &Context) -> Result<BTreeMap<String, Tensor>> {
        let mut kept_tensors = ctx.kept_tensors().borrow_mut();
        let passing = std::mem::take(&mut *kept_tensors);
        for name in &self.body.layers[index].takes {
            if let Some(kept) = passing.get(name) {
                kept_tensors.insert(name.clone(), kept.f_view_as(kept)?);
            }
        }
        Ok(passing)
    }

    /// Puts back what was kept, with what the layer has left.
    fn take(&self, index: usize, mut passing: BTreeMap<String, Tensor>, ctx: &Context) {
        let mut kept_tensors = ctx.kept_tensors().borrow_mut();
        for name in &self.body.layers[index].leaves {
            passing.extend(kept_tensors.remove_entry(name));
        }
        *kept_tensors = passing;
    }

    /// A layer of whole sentences that keeps only what enters it (activation checkpointing).
    fn recomputed(
        &self,
        index: usize,
        streams: Streams,
        own: &Ranges,
        causal: bool,
        memory: Option<(&Tensor, &Ranges)>,
        ctx: &Context,
    ) -> Result<Streams> {
        let clone = |t: &Option<Tensor>| t.as_ref().map(Tensor::shallow_clone);
        let layer = &self.body.layers[index];
        let (kept, after) = (layer.keeps(&streams), streams.others.len() + layer.adds());
        let (names, taken): (Vec<String>, Vec<Tensor>) =
            std::mem::take(&mut *ctx.kept_tensors().borrow_mut()).into_iter().unzip();
        let sites = Rc::new(Cell::new(0));
        let piece = {
            let (body, sites, start) = (self.body.clone(), sites.clone(), ctx.fork(false));
            let (own, across) = (own.shallow_clone(), memory.map(|(_, ranges)| ranges.shallow_clone()));
            let (others, alpha_t) = (streams.others.len(), clone(&streams.alpha_t));
            let names = names.clone();
            move |mut inputs: Vec<Tensor>, is_recompute| {
                let ctx = start.fork(is_recompute);
                let memory = across.as_ref().map(|_| inputs.pop().expect("the memory is the last input"));
                let memory = memory.as_ref().zip(across.as_ref());
                let taken = inputs.split_off(inputs.len() - names.len());
                ctx.kept_tensors().borrow_mut().extend(names.iter().cloned().zip(taken));
                let streams = Streams::of(inputs, others, clone(&alpha_t));
                let streams = body.layer(index, streams, &ctx, &mut whole(&own, causal, memory, &ctx))?;
                sites.set(ctx.dropout_sites());
                let mut kept_tensors = ctx.kept_tensors().borrow_mut();
                let left = body.layers[index].leaves.iter().filter_map(|name| kept_tensors.remove(name));
                Ok(left.chain(streams.tensors().skip(kept).map(Tensor::shallow_clone)).collect())
            }
        };
        let inputs = streams.tensors().chain(&taken).chain(memory.map(|(memory, _)| memory));
        let outputs = operator::recomputed(&inputs.collect::<Vec<_>>(), piece)?;
        ctx.set_dropout_sites(sites.get());
        let mut outputs = outputs.into_iter();
        ctx.kept_tensors().borrow_mut().extend(layer.leaves.iter().cloned().zip(outputs.by_ref()));
        let passed = streams.tensors().take(kept).map(Tensor::shallow_clone);
        Ok(Streams::of(passed.chain(outputs), after, clone(&streams.alpha_t)))
    }

    /// The number of the update that is about to be made, for schemes that grow.
    pub fn set_update(&self, update: i64) -> Result<()> {
        self.body.flow.set_update(update)
    }
}

impl Body {
    fn layer(&self, index: usize, mut streams: Streams, ctx: &Context, attend: &mut Attend) -> Result<Streams> {
        let Layer { begin, sublayers, .. } = &self.layers[index];
        streams.x = begin.apply(streams.x, ctx)?;
        for (s, branch) in sublayers.iter().enumerate() {
            let input = branch.input(&mut streams, ctx)?;
            let f = match &branch.function {
                SublayerFunction::SelfAttention(a) => attend(Attends::Itself(a), &branch.inside, &input)?,
                SublayerFunction::Tensorized(a) => attend(Attends::Segment(a), &branch.inside, &input)?,
                SublayerFunction::CrossAttention(a) => attend(Attends::Memory(a), &branch.inside, &input)?,
                SublayerFunction::FeedForward(f) => f.forward(&input, &branch.inside, ctx)?,
            };
            streams = branch.close(streams, f, self.norm_after(index, s), ctx)?;
        }
        Ok(streams)
    }

    /// The norm that the stream meets first after a sublayer: the next sublayer's, or the stack's last.
    fn norm_after(&self, layer: usize, sublayer: usize) -> Option<&dyn Norm> {
        match self.layers[layer].sublayers.get(sublayer + 1) {
            Some(next) => next.around.before.norm(),
            None if self.flow.combine.is_some() => None,
            None => match self.layers.get(layer + 1) {
                Some(next) if next.begin.only_look() => next.sublayers[0].around.before.norm(),
                Some(_) => None,
                None => self.flow.end_norm(),
            },
        }
    }
}

fn no_steps() -> Error {
    Error::invalid("tensorized attention reads whole segments: it does not decode token by token")
}

/// An attention sublayer, and whom it looks at.
enum Attends<'a> {
    Itself(&'a Attention),
    Segment(&'a Tensorized),
    Memory(&'a Attention),
}

/// How attention is computed: whole sentences or a step with a cache. (attention, inside, input) → F.
type Attend<'a> = dyn FnMut(Attends, &Inside, &Tensor) -> Result<Tensor> + 'a;

/// Of whole sentences, every one to itself (`causal`: to its past), and to the memory if there is one.
fn whole<'a>(
    own: &'a Ranges,
    causal: bool,
    memory: Option<(&'a Tensor, &'a Ranges)>,
    ctx: &'a Context,
) -> impl FnMut(Attends, &Inside, &Tensor) -> Result<Tensor> + 'a {
    move |attention, inside, input| match (attention, memory) {
        (Attends::Memory(attention), Some((memory, ranges))) => {
            let memory = attention.memory(memory, inside, ctx)?;
            attention.attend_memory(input, &memory, ranges, inside, ctx)
        }
        (Attends::Itself(attention) | Attends::Memory(attention), _) => {
            attention.attend(input, own, causal, inside, ctx)
        }
        (Attends::Segment(attention), _) => attention.attend(input, own, inside, ctx),
    }
}
