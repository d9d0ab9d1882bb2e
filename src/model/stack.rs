//! A stack of layers: the encoder or the decoder.

use super::attention::{Attention, Cache};
use super::layer::{Layer, Streams, SublayerFunction};
use super::norm::Norm;
use super::residual::{BuiltEnds, Inside};
use super::smear::Smear;
use super::tensorized::Tensorized;
use super::written_rows::WrittenRows;
use super::{Builder, Context, Ranges, Reads};
use crate::error::{Error, Result};
use crate::host::host;
use crate::init::Init;
use crate::kernel::view::accumulation;
use crate::operator;
use crate::residual::{Change, LayerContext, Schemes};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use tch::Tensor;

pub struct Stack {
    body: Rc<Body>,
}

struct Body {
    layers: Vec<Layer>,
    flow: BuiltEnds,
    smear: Option<Smear>,
}

/// The keys and values of decoded tokens in each layer, and the rows that each slot reads. A slot is a hypothesis, or a
/// text that the model continues.
#[derive(Default)]
pub struct StackCache {
    layers: Vec<Option<Cache>>,
    /// The embeddings before smear; `None` if the stack has no smear.
    embeddings: Option<WrittenRows>,
    /// The number of rows that have been written.
    length: usize,
    /// The value of `length` at which the cache next searches for rows that no slot reads.
    full: usize,
    reads: Reads,
}

impl StackCache {
    /// Makes slot i a copy of the earlier slot order[i]. `order` may be shorter or longer than the number of slots.
    pub fn reorder(&mut self, order: &Tensor) -> Result<()> {
        self.reads = self.reads.select(&host::<i64>("order", order)?);
        self.compact()
    }

    /// Returns, for each slot, the rows of its own tokens, which it reads.
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Replaces the slots by new ones that read these rows of the cache. Rows that no new slot reads stay until
    /// [`compact`](Self::compact) drops them.
    pub fn set_reads(&mut self, reads: Reads) {
        self.reads = reads;
    }

    /// Drops the rows that no slot reads, once these are half of all rows. So the cache has at most four times the
    /// rows that it needs, or at most [`SMALL`](Self::SMALL).
    pub fn compact(&mut self) -> Result<()> {
        // The next search begins when the cache has doubled since the last one.
        if self.length < self.full.max(Self::SMALL) {
            return Ok(());
        }
        let (kept, reads) = self.reads.compacted(self.length);
        if 2 * kept.len() <= self.length {
            (self.length, self.reads) = (kept.len(), reads);
            let kept = Tensor::f_from_slice(&kept)?;
            self.layers.iter_mut().flatten().try_for_each(|cache| cache.keep(&kept))?;
            self.embeddings.iter_mut().try_for_each(|rows| rows.keep(&kept))?;
        }
        self.full = 2 * self.length;
        Ok(())
    }

    /// Stores embeddings x (rows, d) from `first_row` on. The first call reserves room for `room_factor` times the rows
    /// of x.
    fn write_embeddings(&mut self, x: &Tensor, first_row: usize, room_factor: i64) -> Result<()> {
        let rows = match &mut self.embeddings {
            Some(rows) => rows,
            None => self.embeddings.insert(WrittenRows::empty(x, room_factor * x.size()[0])?),
        };
        rows.write(x, first_row as i64)
    }

    /// Returns the embedding of the last token of each slot, or zeros for a slot without tokens; x is (slots, d).
    fn last_embeddings(&self, x: &Tensor) -> Result<Tensor> {
        let Some(rows) = &self.embeddings else { return Ok(x.f_zeros_like()?) };
        let last = self.reads.last();
        // A slot without tokens selects any row; the mask replaces it by zeros.
        let index: Vec<i64> = last.iter().map(|row| row.unwrap_or(0)).collect();
        let is_first: Vec<bool> = last.iter().map(Option::is_none).collect();
        let index = Tensor::f_from_slice(&index)?.f_to_device(x.device())?;
        let is_first = Tensor::f_from_slice(&is_first)?.f_to_device(x.device())?.f_unsqueeze(1)?;
        Ok(rows.all().f_index_select(0, &index)?.f_masked_fill(&is_first, 0.0)?)
    }

    /// Returns the number of key and value rows in each layer.
    #[cfg(test)]
    pub fn rows(&self) -> usize {
        self.length
    }

    /// The number of rows up to which the cache is never compacted, because that would save little.
    const SMALL: usize = 1024;
}

/// The keys and values of the encoder output, for each layer.
pub type StackMemory = Vec<(Tensor, Tensor)>;

impl Stack {
    /// Builds the encoder or the decoder, whichever `place` belongs to, and declares its parameters.
    pub fn build(b: &mut Builder, place: &LayerContext, init: &Init, schemes: &Schemes) -> Result<Self> {
        let flow = schemes.flow(place);
        let has_biases = schemes.has_biases() && place.model.has_biases;
        // Layers are built one by one. So a forged configuration with thousands of layers fails at the first layer
        // whose weights are missing, before it uses much memory.
        let mut layers = b.within("layers", |b| {
            let layer = |layer| {
                let place = LayerContext { layer, ..*place };
                b.within(&layer.to_string(), |b| Layer::build(b, &place, init, has_biases, &schemes.layer(&place)))
            };
            (0..place.layers()).map(layer).collect::<Result<Vec<_>>>()
        })?;
        // A layer hands on only those kept tensors that a later layer or the stack's end reads. The layers are visited
        // from the last to the first, so that `needed` holds the names that are read after the current layer.
        let mut needed: BTreeSet<String> = flow.end.iter().filter_map(Change::mixes).map(String::from).collect();
        for layer in layers.iter_mut().rev() {
            layer.leaves.retain(|name| needed.contains(name));
            needed.extend(layer.takes.iter().cloned());
        }
        let flow = BuiltEnds::build(b, place, &flow)?;
        let smear = if place.model.smear { Some(Smear::build(b, place.model.d_model)?) } else { None };
        Ok(Stack { body: Rc::new(Body { layers, flow, smear }) })
    }

    /// Runs whole sentences; x is (rows, d). Each token attends to its whole sentence, or with `causal` to its past.
    /// The ranges `own` say which rows are a sentence. It also attends to the memory, the encoder's output with its
    /// ranges, if there is one.
    pub fn forward(
        &self,
        x: Tensor,
        own: &Ranges,
        causal: bool,
        memory: Option<(&Tensor, &Ranges)>,
        ctx: &Context,
    ) -> Result<Tensor> {
        let x = self.enter(x, ctx, |x| row_before(x, ctx))?;
        self.run(x, ctx, &mut |index, streams| match ctx.recompute {
            true => self.recomputed(index, streams, own, causal, memory, ctx),
            false => self.body.layer(index, streams, ctx, &mut whole(own, causal, memory, ctx)),
        })
    }

    /// Returns the keys and values of an encoder's output in each layer, for [`step`](Self::step).
    pub fn memory(&self, memory: &Tensor, ctx: &Context) -> Result<StackMemory> {
        self.body
            .layers
            .iter()
            .flat_map(|layer| &layer.sublayers)
            .filter_map(|sublayer| match &sublayer.function {
                SublayerFunction::CrossAttention(attention) => Some(attention.memory(memory, &sublayer.inside, ctx)),
                _ => None,
            })
            .collect()
    }

    /// Starts new slots (texts), after the slots in the cache, and runs all their tokens at once. x is (rows, d), one
    /// slot after the other. `offsets` and the attention ranges `own` both say where each slot begins. Errors if the
    /// stack reads an encoder's output.
    pub fn begin(
        &self,
        x: Tensor,
        own: &Ranges,
        offsets: &[i64],
        cache: &mut StackCache,
        ctx: &Context,
    ) -> Result<Tensor> {
        cache.layers.resize_with(self.body.layers.len(), || None);
        let first_row = cache.length; // of the new slots
        let new_rows = offsets.windows(2).map(|ends| first_row as i64 + ends[0]..first_row as i64 + ends[1]);
        cache.reads = std::mem::take(&mut cache.reads).joined(&Reads::ranges(new_rows));
        cache.length += x.size()[0] as usize;
        let x = self.enter(x, ctx, |x| {
            cache.write_embeddings(x, first_row, WrittenRows::ROOM_OF_TEXT)?;
            row_before(x, ctx)
        })?;
        self.run(x, ctx, &mut |index, streams| {
            let layer_cache = &mut cache.layers[index];
            self.body.layer(index, streams, ctx, &mut |attention, inside, input| match attention {
                Attends::Itself(attention) => attention.begin(input, layer_cache, first_row, own, inside, ctx),
                Attends::Memory(_) => Err(Error::invalid("a decoder that reads an encoder decodes token by token")),
                Attends::Segment(_) => Err(no_steps()),
            })
        })
    }

    /// Runs one more token in every slot (a text or a hypothesis); x is (slots, d). An empty cache gets as many slots
    /// as x has rows. `memory` holds the keys and values of the encoder's output, and which of their rows each slot
    /// reads.
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
        let first_row = cache.length; // of the first slot's token; the other tokens follow
        let x = self.enter(x, ctx, |x| {
            let before = cache.last_embeddings(x)?; // those of each slot's previous token, for smear
            cache.write_embeddings(x, first_row, WrittenRows::ROOM_OF_STEP)?;
            Ok(before)
        })?;
        (cache.reads, cache.length) = (cache.reads.followed_by(first_row), first_row + slots);
        self.run(x, ctx, &mut |index, streams| {
            let StackCache { layers, reads, .. } = &mut *cache;
            let layer_cache = &mut layers[index];
            self.body.layer(index, streams, ctx, &mut |attention, inside, input| match (attention, memory) {
                (Attends::Memory(attention), Some((memory, reads))) => {
                    attention.read_memory(input, &memory[index], reads, inside, ctx)
                }
                // A stack without memory has no cross-attention, so this is self-attention.
                (Attends::Itself(attention) | Attends::Memory(attention), _) => {
                    attention.step(input, layer_cache, first_row, reads, inside, ctx)
                }
                (Attends::Segment(_), _) => Err(no_steps()),
            })
        })
    }

    #[cfg(test)]
    pub fn layers(&self) -> &[Layer] {
        &self.body.layers
    }

    /// Computes the first layer's input from the embedding x. For smear, `before` returns the embedding of each row's
    /// previous token.
    fn enter(&self, x: Tensor, ctx: &Context, before: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
        ctx.kept_tensors().borrow_mut().clear();
        self.body.flow.enter(x, ctx, |x| match &self.body.smear {
            Some(smear) => smear.apply(&x, &before(&x)?, ctx),
            None => Ok(x),
        })
    }

    /// Runs all layers, one after the other, and ends the stack; x is the output of [`enter`](Self::enter). `layer`
    /// runs the layer of an index, counted from 0, on the streams.
    fn run(
        &self,
        x: Tensor,
        ctx: &Context,
        layer: &mut dyn FnMut(usize, Streams) -> Result<Streams>,
    ) -> Result<Tensor> {
        let Body { layers, flow, .. } = &*self.body;
        let kind = accumulation(x.kind());
        let deviation = ctx.profile.then(|| Tensor::f_ones([1i64].as_slice(), (kind, x.device()))).transpose()?;
        ctx.show(|watch| watch.stack(&x))?;
        let (x, other_streams) = flow.begin(x)?;
        let other_count = other_streams.len();
        let mut streams = Streams::of([x].into_iter().chain(other_streams), other_count, None);
        streams.deviation = deviation;
        let alphas = flow.alphas(layers.len(), kind)?;
        let mut outputs = vec![]; // the embedding and the layers' outputs, which `combine` collects
        for index in 0..layers.len() {
            streams.alpha_t = alphas.get(index).map(Tensor::shallow_clone);
            if let Some(combine) = &flow.combine {
                streams = Streams { x: combine.next(streams.x, &mut outputs, ctx)?, normed: None, ..streams };
            }
            let all_kept = self.lend_kept(index, ctx)?;
            ctx.show(|watch| watch.layer_input(&flow.seen(&streams.x, &streams.others)?))?;
            // Tensors that the layer leaves unchanged go around it; the layer gets views of them.
            streams = match layers[index].keeps(&streams) {
                0 => layer(index, streams)?,
                kept => {
                    let after = layer(index, streams.viewed()?)?;
                    streams.followed_by(kept, after)
                }
            };
            self.restore_kept(index, all_kept, ctx);
            ctx.show(|watch| watch.layer(&flow.seen(&streams.x, &streams.others)?))?;
        }
        if let Some(combine) = &flow.combine {
            streams = Streams { x: combine.next(streams.x, &mut outputs, ctx)?, normed: None, ..streams };
        }
        // The last sublayer's fused step may have computed the norm that ends the stack.
        match streams.normed {
            Some(normed) => Ok(normed),
            None => flow.finish(streams.x, streams.others, ctx),
        }
    }

    /// Takes all tensors that layers have kept out of the context and returns them. Leaves in the context only views of
    /// those that layer `index` reads. Because of the view, autograd first sums the gradients that come from within the
    /// layer.
    fn lend_kept(&self, index: usize, ctx: &Context) -> Result<BTreeMap<String, Tensor>> {
        let mut kept_tensors = ctx.kept_tensors().borrow_mut();
        let all_kept = std::mem::take(&mut *kept_tensors);
        for name in &self.body.layers[index].takes {
            if let Some(kept) = all_kept.get(name) {
                kept_tensors.insert(name.clone(), kept.f_view_as(kept)?);
            }
        }
        Ok(all_kept)
    }

    /// Puts all kept tensors back into the context, together with those that layer `index` has kept for later layers.
    fn restore_kept(&self, index: usize, mut all_kept: BTreeMap<String, Tensor>, ctx: &Context) {
        let mut kept_tensors = ctx.kept_tensors().borrow_mut();
        for name in &self.body.layers[index].leaves {
            all_kept.extend(kept_tensors.remove_entry(name));
        }
        *kept_tensors = all_kept;
    }

    /// Runs layer `index` on whole sentences and keeps only its input: the backward pass runs the layer again
    /// (activation checkpointing). `streams` are the layer's input; the other arguments are those of
    /// [`forward`](Self::forward).
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
        // Tensors that the layer leaves unchanged go around it. `others_after` counts the streams beside x after it.
        let (unchanged, others_after) = (layer.keeps(&streams), streams.others.len() + layer.adds());
        let (kept_names, kept): (Vec<String>, Vec<Tensor>) =
            std::mem::take(&mut *ctx.kept_tensors().borrow_mut()).into_iter().unzip();
        // The number of dropout sites after the layer, which the closure sets.
        let sites = Rc::new(Cell::new(0));
        // The closure's inputs are the streams' tensors, the kept tensors and the memory. Its outputs are the tensors
        // that the layer keeps for later layers, then those of the streams that the layer changes.
        let run_layer = {
            // Both runs begin at the dropout site of `start`, so that they draw the same masks.
            let is_recompute = false;
            let (body, sites, start) = (self.body.clone(), sites.clone(), ctx.fork(is_recompute));
            // The closure must own all that it reads, because the backward pass calls it later.
            let (own, across) = (own.shallow_clone(), memory.map(|(_, ranges)| ranges.shallow_clone()));
            let (others, alpha_t) = (streams.others.len(), clone(&streams.alpha_t));
            move |mut inputs: Vec<Tensor>, is_recompute| {
                let ctx = start.fork(is_recompute);
                let memory = across.as_ref().map(|_| inputs.pop().expect("the memory is the last input"));
                let memory = memory.as_ref().zip(across.as_ref());
                let kept = inputs.split_off(inputs.len() - kept_names.len());
                ctx.kept_tensors().borrow_mut().extend(kept_names.iter().cloned().zip(kept));
                let streams = Streams::of(inputs, others, clone(&alpha_t));
                let streams = body.layer(index, streams, &ctx, &mut whole(&own, causal, memory, &ctx))?;
                sites.set(ctx.dropout_sites());
                let mut kept_tensors = ctx.kept_tensors().borrow_mut();
                let kept_here = body.layers[index].leaves.iter().filter_map(|name| kept_tensors.remove(name));
                Ok(kept_here.chain(streams.tensors().skip(unchanged).map(Tensor::shallow_clone)).collect())
            }
        };
        let inputs = streams.tensors().chain(&kept).chain(memory.map(|(memory, _)| memory));
        let outputs = operator::recomputed(&inputs.collect::<Vec<_>>(), run_layer)?;
        ctx.set_dropout_sites(sites.get());
        let mut outputs = outputs.into_iter();
        ctx.kept_tensors().borrow_mut().extend(layer.leaves.iter().cloned().zip(outputs.by_ref()));
        let passed = streams.tensors().take(unchanged).map(Tensor::shallow_clone);
        Ok(Streams::of(passed.chain(outputs), others_after, clone(&streams.alpha_t)))
    }
}

impl Body {
    /// Runs layer `index`: the changes at its beginning, then each sublayer and its residual connection. `attend`
    /// computes the attention sublayers, because whole sentences and single steps need different functions.
    fn layer(&self, index: usize, mut streams: Streams, ctx: &Context, attend: &mut Attend) -> Result<Streams> {
        let Layer { begin, sublayers, .. } = &self.layers[index];
        streams.x = begin.apply(streams.x, ctx)?;
        for (number, branch) in sublayers.iter().enumerate() {
            let input = branch.input(&mut streams, ctx)?;
            let f = match &branch.function {
                SublayerFunction::SelfAttention(a) => attend(Attends::Itself(a), &branch.inside, &input)?,
                SublayerFunction::Tensorized(a) => attend(Attends::Segment(a), &branch.inside, &input)?,
                SublayerFunction::CrossAttention(a) => attend(Attends::Memory(a), &branch.inside, &input)?,
                SublayerFunction::FeedForward(f) => f.forward(&input, &branch.inside, ctx)?,
            };
            streams = branch.close(streams, f, self.norm_after(index, number), ctx)?;
        }
        Ok(streams)
    }

    /// Returns the norm that directly follows a sublayer: the norm before the next sublayer, or the norm that ends
    /// the stack. Returns `None` if any other change comes first. `layer` and `sublayer` are indices from 0.
    fn norm_after(&self, layer: usize, sublayer: usize) -> Option<&dyn Norm> {
        match self.layers[layer].sublayers.get(sublayer + 1) {
            Some(next) => next.around.before.norm(),
            None if self.flow.combine.is_some() => None, // the sum of outputs comes first
            None => match self.layers.get(layer + 1) {
                // The next layer at most keeps x for later layers, so its first norm reads x itself.
                Some(next) if next.begin.only_look() => next.sublayers[0].around.before.norm(),
                Some(_) => None,
                None => self.flow.end_norm(),
            },
        }
    }
}

/// Returns the previous row of each row of packed sentences, or zeros for the first row of a sentence.
fn row_before(x: &Tensor, ctx: &Context) -> Result<Tensor> {
    // The roll gives each sentence's first row a row of another sentence; the mask replaces it by zeros.
    let is_first = ctx.positions()?.f_eq(0)?.f_unsqueeze(1)?;
    Ok(x.f_roll([1].as_slice(), [0].as_slice())?.f_masked_fill(&is_first, 0.0)?)
}

/// Returns the error of tensorized attention in a decoding step.
fn no_steps() -> Error {
    Error::invalid("tensorized attention reads whole segments: it does not decode token by token")
}

/// An attention sublayer, by the source of its keys: its own sentence, its segment, or the encoder's output.
enum Attends<'a> {
    Itself(&'a Attention),
    Segment(&'a Tensorized),
    Memory(&'a Attention),
}

/// The function that computes an attention sublayer, for whole sentences or for one step with a cache. It maps the
/// attention, the scheme's changes inside it and its input x to F(x).
type Attend<'a> = dyn FnMut(Attends, &Inside, &Tensor) -> Result<Tensor> + 'a;

/// Returns the attention function for whole sentences. Each token attends to its whole sentence (`own`), or with
/// `causal` to its past, and to the memory, an encoder's output with its ranges, if there is one.
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
        // A stack without memory has no cross-attention, so this is self-attention.
        (Attends::Itself(attention) | Attends::Memory(attention), _) => {
            attention.attend(input, own, causal, inside, ctx)
        }
        (Attends::Segment(attention), _) => attention.attend(input, own, inside, ctx),
    }
}
