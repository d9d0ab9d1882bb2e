//! CUDA graphs of forward and backward passes: one call launches the thousands of kernels of a pass.
//!
//! A graph has fixed shapes and fixed addresses. So batches are padded to one of a few shapes ([`shape`]), and their
//! tensors are copied to the addresses that the graph of that shape reads. Padding changes results only by rounding:
//! no real token attends to padding rows, losses and statistics leave these rows out, and each row has its own
//! dropout mask.

use super::forward_backward::TrainStep;
use super::loss::LossSums;
use super::micro_batch::{MicroBatch, Shape, Turn};
use crate::data::Batch;
use crate::error::Result;
use crate::model::{DeviceBuffer, HostBatch};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use tch::Device;

/// The work that a graph records.
pub type Work = Rc<dyn Fn() -> Result<()>>;

/// A recorder of CUDA graphs.
pub trait Recorder: Send {
    /// Records the kernels that `work` launches, without running them.
    fn record(&mut self, work: Work) -> Result<Box<dyn Replay>>;
}

/// A recorded graph.
pub trait Replay {
    /// Launches the graph on the device's current stream.
    fn replay(&self) -> Result<()>;
}

/// The maximum number of graphs. When it is reached, batches of new shapes run without a graph.
const GRAPHS: usize = 128;
/// The rows of one side (source or target) are padded to a multiple of `max_tokens`/ROW_STEPS, which is itself rounded
/// up to a multiple of ROW_MULTIPLE.
const ROW_STEPS: usize = 16;
const ROW_MULTIPLE: usize = 64;
/// The longest sentence's length is rounded up to a multiple of LENGTH_MULTIPLE. Above 32 tokens there are only
/// LENGTHS_PER_DOUBLING lengths per doubling: 40, 48, 56, 64, 80, …
const LENGTH_MULTIPLE: usize = 4;
const LENGTHS_PER_DOUBLING: usize = 4;

/// The graphs of a training run.
pub struct Graphs {
    recorder: Box<dyn Recorder>,
    /// The maximum number of padded tokens in a batch.
    max_tokens: usize,
    device: Device,
    /// The shapes seen so far. A shape is recorded with its second batch, because the first one loads kernels and
    /// libraries, which then make one-time choices, such as of an algorithm. The flag is [`Turn`]'s `is_partial`.
    seen: HashSet<(Shape, bool)>,
    /// The recorded graphs, by shape and by `is_partial`.
    graphs: HashMap<(Shape, bool), Graph>,
    /// True once recording has failed. Then no further pass is recorded or padded.
    is_broken: bool,
    /// Why recording has failed, until [`complaint`](Self::complaint) returns it.
    complaint: Option<String>,
}

/// A recorded pass.
struct Graph {
    /// The memory from which the graph reads its batch.
    buffer: DeviceBuffer,
    recorded: Box<dyn Replay>,
    /// The losses of the latest replay; `None` before recording.
    sums: Rc<RefCell<Option<LossSums>>>,
}

impl Graphs {
    /// Creates the graphs for batches of at most `max_tokens` padded tokens.
    pub fn new(recorder: Box<dyn Recorder>, max_tokens: usize, device: Device) -> Self {
        let (seen, graphs) = Default::default();
        Graphs { recorder, max_tokens, device, seen, graphs, is_broken: false, complaint: None }
    }

    /// Runs [`TrainStep::run`] on a batch. Replays the graph of the batch's shape if there is one.
    pub fn run(&mut self, step: &Rc<TrainStep>, batch: &Batch, turn: Turn) -> Result<LossSums> {
        let shape = shape(batch, self.max_tokens);
        // Returns the batch padded to a shape; with `None` it is not padded.
        let padded_to = |shape| MicroBatch::on_host(batch, shape, turn, self.device);
        let key = (shape, turn.is_partial);
        if let Some(graph) = self.graphs.get_mut(&key) {
            return graph.run(&mut padded_to(Some(shape))?);
        }
        // The first batch of a shape runs without recording, for the reason given at `seen`.
        let is_new = self.seen.insert(key);
        if !is_new && !self.is_broken && self.graphs.len() < GRAPHS {
            match Graph::record(&mut *self.recorder, step, padded_to(Some(shape))?, self.device) {
                // Recording does not execute the pass, so the new graph is replayed on the batch that it was recorded
                // with.
                Ok(graph) => return self.graphs.entry(key).or_insert(graph).replay(),
                Err(error) => {
                    self.complaint = Some(format!("no CUDA graphs, and so a slower training: {error}"));
                    self.is_broken = true;
                    // The failure may be out-of-memory, so the recorded graphs are dropped.
                    self.graphs.clear();
                }
            }
        }
        // A batch is padded even without a graph, so that a later recording finds the same kernels loaded.
        // After a failed recording, padding would only cost time.
        let shape = (!self.is_broken).then_some(shape);
        step.run(&padded_to(shape)?.to(self.device)?)
    }

    /// Returns why recording has failed; `None` if it has not, or if an earlier call has returned the reason.
    pub fn complaint(&mut self) -> Option<String> {
        self.complaint.take()
    }
}

impl Graph {
    /// Records the pass of `step` over a batch. The batch's tensors become the graph's input, at addresses that stay.
    fn record(
        recorder: &mut dyn Recorder,
        step: &Rc<TrainStep>,
        mut batch: MicroBatch,
        device: Device,
    ) -> Result<Self> {
        let buffer = DeviceBuffer::load(&mut batch, device)?;
        let sums = Rc::new(RefCell::new(None));
        let (step, target) = (step.clone(), Rc::clone(&sums));
        let recorded = recorder.record(Rc::new(move || {
            let losses = step.run(&batch)?;
            target.replace(Some(losses));
            Ok(())
        }))?;
        Ok(Graph { buffer, recorded, sums })
    }

    /// Copies a batch of the graph's shape into the graph's buffer, and replays the graph.
    fn run(&mut self, batch: &mut MicroBatch) -> Result<LossSums> {
        self.buffer.reload(batch)?;
        self.replay()
    }

    /// Replays the graph on the batch in its buffer.
    fn replay(&mut self) -> Result<LossSums> {
        self.recorded.replay()?;
        // The next replay overwrites the sums, so the caller gets a copy.
        self.sums.borrow().as_ref().expect("recording makes them").copy()
    }
}

/// Returns the shape to which a batch of at most `max_tokens` padded tokens is padded. The shapes are few, so that few
/// graphs are needed.
fn shape(batch: &Batch, max_tokens: usize) -> Shape {
    let (target, source) = (&batch.target_input, batch.source.as_ref());
    let longest = source.map_or(0, |source| source.longest).max(target.longest).max(1);
    // The lengths between powers of two p/2 and p are (p/2)/LENGTHS_PER_DOUBLING apart, but at least LENGTH_MULTIPLE.
    let spacing = (longest.next_power_of_two() / (2 * LENGTHS_PER_DOUBLING)).max(LENGTH_MULTIPLE);
    let longest = longest.next_multiple_of(spacing);
    // In a batch of this shape the longest sentence has at least `longest − spacing + 1` tokens. `max_tokens` counts
    // every sentence with that length, so this is the largest number of sentences.
    let sentences = max_tokens / (longest - spacing + 1);
    let row_spacing = (max_tokens / ROW_STEPS).max(1).next_multiple_of(ROW_MULTIPLE);
    let rows = |tokens: &[i64]| tokens.len().next_multiple_of(row_spacing) as i64;
    Shape {
        source_rows: source.map_or(0, |source| rows(&source.tokens)),
        target_rows: rows(&target.tokens),
        sentences: sentences as i64,
        longest: longest as i64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TransformerConfig;
    use crate::data::{collate, plan, Corpus};
    use crate::kernel::cross_entropy::Smoothing;
    use crate::model::{Transformer, BOS, UNK};
    use crate::operator::ProcessGroup;
    use crate::train::Objective;
    use std::sync::Arc;
    use tch::{Kind, Tensor};

    /// A recorder for devices without streams. Its graphs replay a pass by running the work again.
    struct ReplayRecorder;

    impl Recorder for ReplayRecorder {
        /// Returns a graph that runs the work again at each replay.
        fn record(&mut self, work: Work) -> Result<Box<dyn Replay>> {
            struct ReplayedWork(Work);
            impl Replay for ReplayedWork {
                fn replay(&self) -> Result<()> {
                    (self.0)()
                }
            }
            Ok(Box::new(ReplayedWork(work)))
        }
    }

    /// A recorder that always fails.
    struct FailingRecorder;

    impl Recorder for FailingRecorder {
        fn record(&mut self, _: Work) -> Result<Box<dyn Replay>> {
            Err(crate::error::Error::invalid("not here"))
        }
    }

    /// A recorder with room for one graph.
    struct SingleRecorder(Arc<()>);

    impl Recorder for SingleRecorder {
        fn record(&mut self, work: Work) -> Result<Box<dyn Replay>> {
            struct ReplayedWork(Work, #[allow(dead_code, reason = "counts the graphs that live")] Arc<()>);
            impl Replay for ReplayedWork {
                fn replay(&self) -> Result<()> {
                    (self.0)()
                }
            }
            match Arc::strong_count(&self.0) {
                // Two references mean that no graph exists: one is the test's, one this recorder's.
                2 => Ok(Box::new(ReplayedWork(work, Arc::clone(&self.0)))),
                _ => Err(crate::error::Error::invalid("full")),
            }
        }
    }

    const MAX_TOKENS: usize = 128;

    /// Returns batches of sentence pairs if `sides` is 2, otherwise of language modelling.
    fn batches(sides: usize) -> Vec<Batch> {
        // Builds 60 sentences of 1 to 19 tokens; `step` varies the order of their lengths.
        let side =
            |step: usize| (0..60).map(|i| (0..1 + i * step % 19).map(|w| 4 + (i + w) as u32 % 16).collect()).collect();
        let corpus = match sides {
            2 => Corpus { source: Some(side(7)), target: side(5), start: BOS as u32 },
            _ => Corpus::language_model(&side(5), 11, MAX_TOKENS).unwrap(),
        };
        let all = plan(&corpus.lengths(), MAX_TOKENS, 1, 0);
        all.iter().map(|sentences| collate(&corpus, sentences)).collect()
    }

    /// Returns the training step of a small model with these options, which are entries of a JSON object.
    fn step(options: &str) -> Rc<TrainStep> {
        let text = format!(
            r#"{{"vocab_size": 20, "d_model": 16, "d_ff": 24, "heads": 2, "encoder_layers": 2, "decoder_layers": 2,
                "dropout": 0.2, {options}}}"#
        );
        let config: TransformerConfig = crate::config::from_json("model", &text).unwrap();
        let all_but_unk = || Tensor::arange(20, (Kind::Int64, Device::Cpu)).not_equal(UNK);
        let mask = options.contains("fixnorm").then(all_but_unk);
        Rc::new(TrainStep {
            model: Transformer::new(&config, 4, Device::Cpu, Kind::Double).unwrap(),
            objective: Objective::new(mask, Smoothing::fairseq(0.1, 20)).unwrap(),
            kind: Kind::Double,
            recompute: options.contains("rmsnorm"),
            measures_logits: true,
            group: ProcessGroup::ALONE,
            flat: None,
            workspace: RefCell::default(),
        })
    }

    /// Returns two training steps whose models have equal parameters.
    fn passes(options: &str) -> [Rc<TrainStep>; 2] {
        let passes = [step(options), step(options)];
        let [first, second] = passes.each_ref().map(|step| step.model.parameters.tensors());
        for (from, to) in first.iter().zip(second) {
            tch::no_grad(|| to.shallow_clone().copy_(from));
        }
        passes
    }

    /// Runs a training step on each batch, with `run(step, batch, seed)`. Returns the losses of all batches, then the
    /// gradients, the buffers and the largest logits at the end.
    fn results(
        step: &Rc<TrainStep>,
        batches: &[Batch],
        mut run: impl FnMut(&Rc<TrainStep>, &Batch, [i64; 3]) -> LossSums,
    ) -> Vec<Tensor> {
        let mut results = vec![];
        for (number, batch) in (1i64..).zip(batches) {
            step.model.set_update(number).unwrap();
            let sums = run(step, batch, [1, number, 0]);
            results.extend([sums.loss, sums.nll]);
        }
        let parameters = &step.model.parameters;
        results.extend(parameters.tensors().iter().map(Tensor::grad));
        results.extend(parameters.buffers().map(|(_, t)| t.to_kind(Kind::Double)));
        results.extend(parameters.attentions().iter().map(|attention| attention.largest.copy()));
        results
    }

    /// Marks every second micro-batch as one that is not the last of its update.
    fn turn(seed: [i64; 3]) -> Turn {
        Turn { seed, scale: 0.01, is_partial: seed[1] % 2 == 0 }
    }

    /// Runs the step on a batch without graphs and padding.
    fn plain(step: &Rc<TrainStep>, batch: &Batch, seed: [i64; 3]) -> LossSums {
        step.run(&MicroBatch::on_host(batch, None, turn(seed), Device::Cpu).unwrap()).unwrap()
    }

    #[test]
    fn a_replayed_step_is_the_step_itself() {
        for options in [
            r#""residual": "prenorm", "norm": "layernorm", "attention_dropout": 0.3"#,
            r#""residual": "branchnorm", "norm": "scalenorm", "fixnorm": true"#,
            r#""residual": "prenorm", "norm": "rmsnorm", "encoder_norm": "batchnorm""#,
            r#""residual": "postnorm", "norm": "powernorm", "powernorm_warmup": 3, "encoder_norm": "powernorm-v""#,
            r#""architecture": "decoder-only", "residual": "subln""#,
            r#""architecture": "decoder-only", "attention": "tensorized", "tensorized_segment": 11"#,
            r#""residual": "dlcl", "norm": "lpnorm", "lpnorm_p": 3"#,
            r#""residual": "normformer", "norm": "batchnorm", "groupscaling": 2"#,
            r#""residual": "mhc", "norm": "rmsnorm", "mhc_streams": 2"#,
            r#""residual": "attnres", "attnres_block": 2"#,
            r#""residual": "attnres", "attnres_form": "normed", "attnres_queries": 3"#,
            r#""residual": "mhc", "mhc_streams": 2, "mhc_mixing": "channel", "mhc_rank": 3"#,
            r#""residual": "hyper-connections", "hyper_connections_streams": 2"#,
            r#""architecture": "decoder-only", "positions": "rotary", "activation": "swiglu", "kv_heads": 1"#,
            r#""positions": "learned", "max_positions": 32, "activation": "gelu", "linear_biases": false"#,
            r#""output_gate": "element", "logit_softcap": 3.0, "qk_norm": true, "qk_norm_over": "all-heads""#,
            r#""output_gate": "head", "sinks": true, "score_softcap": 0.5, "attention_dropout": 0.3"#,
            r#""architecture": "decoder-only", "value_embeddings": true, "smear": true, "residual": "x0-lambdas""#,
            r#""sinks": true, "attention_dropout": 0.0, "v_norm": "weighted""#,
        ] {
            let batches = batches(if options.contains("decoder-only") { 1 } else { 2 });
            let mut graphs = Graphs::new(Box::new(ReplayRecorder), MAX_TOKENS, Device::Cpu);
            let [ours, other] = passes(options);
            let replayed = results(&ours, &batches, |step, batch, seed| graphs.run(step, batch, turn(seed)).unwrap());
            let plain = results(&other, &batches, plain);
            let (seen, recorded) = (graphs.seen.len(), graphs.graphs.len());
            assert!(
                recorded > 0 && batches.len() > seen + recorded,
                "{options}: nothing was replayed with another batch"
            );
            for (place, (replayed, plain)) in replayed.iter().zip(&plain).enumerate() {
                assert!(replayed.allclose(plain, 1e-9, 1e-11, false), "{options}: {place}: {replayed} {plain}");
            }
        }
    }

    #[test]
    fn what_cannot_be_recorded_is_done_and_told_once() {
        let options = r#""residual": "prenorm""#;
        let batches = batches(2);
        let mut graphs = Graphs::new(Box::new(FailingRecorder), MAX_TOKENS, Device::Cpu);
        let mut complaints = vec![];
        let [ours, other] = passes(options);
        let unrecorded = results(&ours, &batches, |step, batch, seed| {
            let sums = graphs.run(step, batch, turn(seed)).unwrap();
            complaints.extend(graphs.complaint());
            sums
        });
        assert_eq!(complaints, ["no CUDA graphs, and so a slower training: not here"]);
        let plain = results(&other, &batches, plain);
        assert!(unrecorded.iter().zip(&plain).all(|(ours, plain)| ours.allclose(plain, 1e-9, 1e-11, false)));
    }

    #[test]
    fn a_failed_recording_frees_the_graphs_before_it() {
        let (step, batches, alive) = (step(r#""residual": "prenorm""#), batches(2), Arc::new(()));
        let mut graphs = Graphs::new(Box::new(SingleRecorder(Arc::clone(&alive))), MAX_TOKENS, Device::Cpu);
        let mut most = 0;
        for (number, batch) in (1i64..).zip(batches.iter().chain(&batches)) {
            graphs.run(&step, batch, turn([1, number, 0])).unwrap();
            most = most.max(Arc::strong_count(&alive));
        }
        assert!(most == 3 && graphs.complaint().is_some(), "one graph was recorded, and a second was not");
        assert_eq!(Arc::strong_count(&alive), 2, "the first graph keeps its memory");
    }

    #[test]
    fn shapes_are_few_and_not_much_larger_than_their_batches() {
        let lengths: Vec<(usize, usize)> =
            (0..30_000).map(|i| 3 + i * 7919 % 83).map(|n| (n, n + n * 7 % 5 - 2)).collect();
        let batch = |sentences: &Vec<usize>| {
            let packed = |lengths: Vec<usize>| {
                crate::data::PackedIds::from_rows(lengths.into_iter().map(|n| std::iter::repeat_n(5, n)))
            };
            let source = packed(sentences.iter().map(|&s| lengths[s].0).collect());
            let target_input = packed(sentences.iter().map(|&s| lengths[s].1).collect());
            Batch { source: Some(source), target_input, target_output: vec![], sentences: sentences.clone() }
        };
        let (mut shapes, mut tokens, mut rows, mut pairs, mut padded_pairs) = (HashSet::new(), 0, 0, 0, 0);
        for sentences in plan(&lengths, 4096, 1, 0) {
            let batch = batch(&sentences);
            let shape = shape(&batch, 4096);
            for (side, room) in
                [(batch.source.as_ref().unwrap(), shape.source_rows), (&batch.target_input, shape.target_rows)]
            {
                assert!(side.tokens.len() as i64 <= room && side.longest as i64 <= shape.longest);
                assert!(side.rows() as i64 <= shape.sentences);
                (tokens, rows) = (tokens + side.tokens.len() as i64, rows + room);
                pairs += side.rows() * side.longest.pow(2);
                padded_pairs += shape.sentences * shape.longest.pow(2);
            }
            shapes.insert(shape);
        }
        assert!(shapes.len() <= GRAPHS, "{} shapes", shapes.len());
        assert!(rows * 100 <= tokens * 104, "{rows} rows for {tokens} tokens");
        assert!(padded_pairs * 100 <= pairs as i64 * 140, "{padded_pairs} places of attention for {pairs}");
    }
}
