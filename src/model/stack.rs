//! A stack of layers, as the encoder and the decoder are.

use super::attention::{Attention, Cache};
use super::layer::{Function, Layer, Stream};
use super::residual::{Flow, Inside};
use super::{Builder, Context, Ranges};
use crate::error::Result;
use crate::init::Init;
use crate::norm::Norm;
use crate::residual::{Place, Scheme};
use tch::{Kind, Tensor};

pub struct Stack {
    layers: Vec<Layer>,
    flow: Flow,
}

/// Per layer, the keys and values of what has been decoded.
#[derive(Default)]
pub struct StackCache(Vec<Option<Cache>>);

impl StackCache {
    /// Slot i becomes what slot order[i] was.
    pub fn reorder(&mut self, order: &Tensor) -> Result<()> {
        self.0.iter_mut().flatten().try_for_each(|cache| cache.reorder(order))
    }
}

/// Per layer, the encoder output's keys and values.
pub type StackMemory = Vec<(Tensor, Tensor)>;

impl Stack {
    /// `place` says which stack.
    pub fn build(b: &mut Builder, place: &Place, init: &Init, scheme: &dyn Scheme) -> Result<Self> {
        let layers = b.within("layers", |b| {
            (0..place.layers())
                .map(|layer| {
                    let place = Place { layer, ..*place };
                    b.within(&layer.to_string(), |b| Layer::build(b, &place, init, scheme))
                })
                .collect::<Result<Vec<_>>>()
        })?;
        let flow = Flow::build(b, place, &scheme.stack(place))?;
        Ok(Stack { layers, flow })
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
        self.run(x, ctx, &mut |_, attends, attention, inside, input| match (attends, memory) {
            (Attends::Memory, Some((memory, ranges))) => {
                let memory = attention.memory(memory, ctx.kind)?;
                attention.attend_memory(input, &memory, ranges, inside, ctx)
            }
            _ => attention.attend(input, own, causal, inside, ctx),
        })
    }

    /// Keys and values of an encoder output, for [`step`](Self::step).
    pub fn memory(&self, memory: &Tensor, ctx: &Context) -> Result<StackMemory> {
        self.layers
            .iter()
            .flat_map(|layer| &layer.sublayers)
            .filter_map(|s| match &s.function {
                Function::CrossAttention(attention) => Some(attention.memory(memory, ctx.kind)),
                _ => None,
            })
            .collect()
    }

    /// One more token of every hypothesis: x (slots, d).
    pub fn step(
        &self,
        x: Tensor,
        cache: &mut StackCache,
        memory: Option<(&StackMemory, &Ranges)>,
        ctx: &Context,
    ) -> Result<Tensor> {
        cache.0.resize_with(self.layers.len(), || None);
        self.run(x, ctx, &mut |layer, attends, attention, inside, input| match (attends, memory) {
            (Attends::Memory, Some((memory, ranges))) => {
                attention.attend_memory(input, &memory[layer], ranges, inside, ctx)
            }
            _ => attention.step(input, &mut cache.0[layer], inside, ctx),
        })
    }

    #[cfg(test)]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    fn run(&self, x: Tensor, ctx: &Context, attend: &mut Attend) -> Result<Tensor> {
        let kind = if x.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let deviation = ctx.profile.then(|| Tensor::f_ones([1i64].as_slice(), (kind, x.device()))).transpose()?;
        let mut stream = Stream { x, normed: None, alpha_t: self.flow.alpha(kind)?, deviation };
        let mut outputs = vec![];
        for (index, layer) in self.layers.iter().enumerate() {
            if let Some(combine) = &self.flow.combine {
                stream = Stream { x: combine.next(stream.x, &mut outputs, ctx)?, normed: None, ..stream };
            }
            for (s, branch) in layer.sublayers.iter().enumerate() {
                let input = branch.input(&stream, ctx)?;
                let f = match &branch.function {
                    Function::SelfAttention(a) => attend(index, Attends::Itself, a, &branch.inside, &input)?,
                    Function::CrossAttention(a) => attend(index, Attends::Memory, a, &branch.inside, &input)?,
                    Function::FeedForward(f) => f.forward(&input, &branch.inside, ctx)?,
                };
                let next = self.norm_after(index, s);
                stream = branch.close(&stream, f, next, ctx)?;
            }
        }
        if let Some(combine) = &self.flow.combine {
            stream = Stream { x: combine.next(stream.x, &mut outputs, ctx)?, normed: None, ..stream };
        }
        match stream.normed {
            Some(normed) => Ok(normed),
            None => self.flow.end.iter().try_fold(stream.x, |x, change| change.apply(&x, &ctx.rows())),
        }
    }

    /// The number of the update that is about to be made, for schemes that grow.
    pub fn set_update(&self, update: i64) -> Result<()> {
        self.flow.set_update(update)
    }

    /// The norm that the stream meets first after a sublayer: the next sublayer's, or the stack's last.
    fn norm_after(&self, layer: usize, sublayer: usize) -> Option<&dyn Norm> {
        match self.layers[layer].sublayers.get(sublayer + 1) {
            Some(next) => next.around.before.as_deref(),
            None if self.flow.combine.is_some() => None,
            None => match self.layers.get(layer + 1) {
                Some(next) => next.sublayers[0].around.before.as_deref(),
                None => self.flow.end_norm(),
            },
        }
    }
}

/// Whom an attention sublayer looks at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attends {
    Itself,
    Memory,
}

/// How attention is computed: whole sentences or a step with a cache. (layer, whom, attention, inside, input) → F.
type Attend<'a> = dyn FnMut(usize, Attends, &Attention, &Inside, &Tensor) -> Result<Tensor> + 'a;
