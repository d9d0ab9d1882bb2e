//! The output layer: computes the most probable next tokens of each slot from the decoder's features.
//!
//! On the CPU the output matrix is packed once, without the rows outside V_t. The product and the choice of tokens
//! then process a few rows of features at a time, so that their logits stay in the processor's cache. On other devices
//! and for 16-bit products, libtorch computes logits, log-softmax and top-k.

use super::continuation::{best, Continuation, Eos, TargetVocabulary};
use crate::error::Result;
use crate::kernel::best::call::best_of_product;
use crate::kernel::best::{Choice, Likely};
use crate::model::{PreparedWeight, Softcap, Transformer, BOS, EOS, PAD};
use tch::{Kind, Tensor};

/// The output projection of a model whose parameters do not change.
pub(super) struct OutputLayer {
    projection: PreparedWeight,
    softcap: Option<Softcap>,
    vocabulary: TargetVocabulary,
}

impl OutputLayer {
    /// Prepares the output projection of a model. `kind` is the type of matrix products.
    pub fn new(model: &Transformer, vocabulary: TargetVocabulary, kind: Kind) -> Result<Self> {
        let (weight, bias) = model.output()?;
        // A packed matrix leaves out the rows outside V_t. Otherwise `log_probabilities` masks their logits.
        let projection = match vocabulary.ids().filter(|_| PreparedWeight::is_packed(weight.device(), kind)) {
            Some(ids) => {
                let ids = Tensor::f_from_slice(ids)?;
                let bias = bias.map(|bias| bias.f_index_select(0, &ids)).transpose()?;
                PreparedWeight::new(&weight.f_index_select(0, &ids)?, bias.as_ref(), kind)?
            }
            None => PreparedWeight::new(&weight, bias, kind)?,
        };
        Ok(OutputLayer { projection, softcap: model.softcap(), vocabulary })
    }

    /// Returns this output layer for use in another thread.
    pub fn share(&self) -> Self {
        let (projection, vocabulary) = (self.projection.shallow_clone(), self.vocabulary.share());
        OutputLayer { projection, softcap: self.softcap, vocabulary }
    }

    /// Returns the `count` most probable tokens for each row of features (slots, d), best first. On ties the lower id
    /// comes first. `kind` is the type of matrix products.
    pub fn best(&self, features: &Tensor, count: usize, eos: Eos, kind: Kind) -> Result<Vec<Vec<Continuation>>> {
        let ids = self.vocabulary.ids();
        // The packed product has one column for each token of V_t. A token outside V_t has none.
        let column = |id: i64| match ids {
            Some(ids) => ids.binary_search(&id).ok(),
            None => Some(id as usize),
        };
        let banned = [Some(BOS), Some(PAD), (eos == Eos::Forbidden).then_some(EOS)];
        let banned: Vec<usize> = banned.into_iter().flatten().filter_map(column).collect();
        let choice = match (eos, column(EOS)) {
            (Eos::Forced, Some(column)) => Choice::Only(column),
            _ => Choice::AllBut(&banned),
        };
        let cap = self.softcap.map(|softcap| softcap.0); // c in c·tanh(logit/c)
        let best_columns = match &self.projection {
            PreparedWeight::F32(w) => best_of_product(features, w, cap, count, choice)?,
            PreparedWeight::F64(w) => best_of_product(features, w, cap, count, choice)?,
            // On another device or for 16-bit products, `log_probabilities` forbids the tokens, and `choice` is unused.
            cast => {
                let mut logits = cast.linear(features, kind)?;
                self.softcap.map_or(Ok(()), |softcap| softcap.write(&mut logits))?;
                return best(&self.vocabulary.log_probabilities(logits, eos)?, count);
            }
        };
        let token = |column: usize| ids.map_or(column as i64, |ids| ids[column]);
        let continuation = |likely: Likely| Continuation { token: token(likely.column), log_probability: likely.log_p };
        Ok(best_columns.into_iter().map(|row| row.into_iter().map(continuation).collect()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TransformerConfig;
    use tch::Device;

    /// Compares the tokens chosen from the packed product with libtorch's top-k of the log-softmax of the logits.
    #[test]
    fn the_packed_output_chooses_like_libtorch() {
        // With these sizes there are several blocks of columns and of rows.
        const V: i64 = 1100;
        const ROWS: i64 = 300;
        for (fixnorm, output_bias, logit_softcap, logit_scale) in [
            (false, false, None, false),
            (true, true, None, false),
            (false, true, Some(2.0), false),
            (false, true, None, true),
        ] {
            let config = TransformerConfig {
                vocab_size: V,
                d_model: 40,
                d_ff: 16,
                heads: 2,
                encoder_layers: 1,
                decoder_layers: 1,
                fixnorm,
                output_bias,
                logit_softcap,
                logit_scale,
                ..Default::default()
            };
            tch::manual_seed(11);
            let model = Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap();
            for tensor in model.parameters.tensors() {
                let _ = tch::no_grad(|| tensor.shallow_clone().f_add_(&tensor.randn_like()).unwrap());
            }
            let features = tch::no_grad(|| Tensor::randn([ROWS, 40], (Kind::Double, Device::Cpu)));
            let mask = Tensor::from_slice(&(0..V).map(|id| id == EOS || id % 3 == 0).collect::<Vec<bool>>());
            for (mask, eos) in [None, Some(&mask)]
                .into_iter()
                .flat_map(|mask| [Eos::Allowed, Eos::Forbidden, Eos::Forced].map(|eos| (mask, eos)))
            {
                let vocabulary = TargetVocabulary::new(mask, V).unwrap();
                let (weight, bias) = model.output().unwrap();
                let logits = features.linear(&weight, bias);
                let logits = logit_softcap.map_or(logits.shallow_clone(), |c| (logits / c).tanh() * c);
                let log_p = vocabulary.log_probabilities(logits, eos).unwrap();
                let wanted = best(&log_p, 10).unwrap();
                let output = OutputLayer::new(&model, vocabulary, Kind::Double).unwrap();
                let found = output.best(&features, 10, eos, Kind::Double).unwrap();
                for (found, wanted) in found.iter().zip(&wanted) {
                    // If only EOS may come, libtorch's top-k fills up with tokens of probability 0.
                    let wanted: Vec<_> = wanted.iter().filter(|c| c.log_probability > f64::NEG_INFINITY).collect();
                    assert_eq!(found.len(), wanted.len());
                    for (found, wanted) in found.iter().zip(wanted) {
                        assert_eq!(found.token, wanted.token, "{eos:?}");
                        assert!((found.log_probability - wanted.log_probability).abs() < 1e-9);
                    }
                }
                assert_eq!(found.len(), ROWS as usize);
            }
        }
    }
}
