//! The trainer: updates, evaluations, and the end of training.

use super::checkpoint::to_arrays;
use super::checkpoint::{Best, Checkpoint, CheckpointStore, ResumePoint};
use super::cuda_graphs::{Graphs, Recorder};
use super::evaluate::{evaluate_bleu, evaluate_loss, Score, Validation};
use super::forward_backward::TrainStep;
use super::layers::PendingLayers;
use super::loss::{LossSums, Objective};
use super::micro_batch::{MicroBatch, Turn};
use super::observer::{Evaluation, Observer, Saved, Started, Update};
use super::optimizer::{self, Optimizer};
use super::schedule::{Schedule, ScheduleMemory};
use super::watched::{watch, Watched};
use crate::config::resume::{self, Effect, OptionChange};
use crate::config::{Criterion, DataConfig, Precision, SearchRule, TrainingConfig};
use crate::data::{Batch, Cursor, Digests, Prefetch, Vocabulary};
use crate::error::{Error, Result};
use crate::model::{HostBatch, Transformer};
use crate::norm::given;
use crate::norm::power_norm::{self, PowerNormMode};
use crate::operator::{Pending, ProcessGroup};
use crate::search::SearchConfig;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Instant;
use tch::{Device, Kind, Tensor};

/// The state that a resumed run needs besides parameters and moments.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Progress {
    /// The number of updates made.
    pub update: u64,
    /// The next batch to read: its epoch, and its index in the epoch.
    pub cursor: Cursor,
    /// The training time in seconds, without evaluations.
    pub seconds: f64,
    /// The best score so far: BLEU or the negative loss.
    pub best: Option<f64>,
    /// The number of evaluations that were made since the best one.
    pub since_best: u64,
    pub evaluations: u64,
    /// True if the run has reached an evaluation that it has not made yet.
    #[serde(default)]
    pub is_due: bool,
    /// The number of the update after which the latest evaluation was made.
    #[serde(default)]
    pub evaluated: u64,
    /// True if this checkpoint was saved only because the user wanted to stop. It is removed when the next one is
    /// complete.
    #[serde(default)]
    pub is_pause: bool,
    pub schedule: Option<ScheduleMemory>,
    /// The number of sentences of the epoch before the cursor, and the number of all its sentences.
    #[serde(default)]
    pub seen: (u64, u64),
    /// The digests of the text to which the cursor and the best score belong.
    #[serde(default)]
    pub text: Option<Digests>,
    /// The seed from which the initial values of the parameters were drawn.
    #[serde(default)]
    pub first_seed: Option<u64>,
    /// True if the run began with another run's weights. The gains that a scheme measures at the start are among these,
    /// so they are not measured again.
    #[serde(default)]
    pub keeps_gains: bool,
}

impl Progress {
    /// Forgets the scores that are not comparable with scores under the changed options. Returns a message for each
    /// option that has such an effect. `has_bleu` is true if evaluations measure BLEU.
    pub fn forget(&mut self, changes: &[OptionChange], criterion: Criterion, has_bleu: bool) -> Vec<String> {
        let mut messages = Vec::new();
        // If BLEU is not measured, the loss chooses the best checkpoint.
        let criterion = if has_bleu { criterion } else { Criterion::Loss };
        for change in changes {
            let mut forgotten = Vec::new();
            if resume::forgets_best(change, criterion) && self.best.is_some() {
                (self.best, self.since_best) = (None, 0);
                forgotten.push("the best score");
            }
            if let Some(memory) = self.schedule.as_mut().filter(|memory| **memory != ScheduleMemory::default()) {
                if change.effects.contains(&Effect::Schedule) {
                    *memory = ScheduleMemory::default();
                    forgotten.push("the schedule's scores and how far it has lowered the rate");
                } else if resume::forgets_scores(change, has_bleu) {
                    memory.forget_scores();
                    forgotten.push("the schedule's scores");
                }
            }
            if !forgotten.is_empty() {
                messages.push(format!("{}: forgotten: {}", change.said, forgotten.join(", ")));
            }
        }
        messages
    }
}

/// A training run: the model, the data, the optimizer, and the run's progress.
pub struct Trainer {
    pub config: TrainingConfig,
    data: DataConfig,
    pub progress: Progress,
    train_step: Rc<TrainStep>,
    /// The CUDA graphs; `None` if passes run eagerly.
    graphs: Option<Graphs>,
    /// The model with its initial values, for `log_statistics`.
    first: Option<Transformer>,
    pub vocabulary: Vocabulary,
    pub validation: Validation,
    pub store: CheckpointStore,
    pub unigram_entropy: f64,
    pub updates_per_epoch: f64,
    optimizer: Optimizer,
    schedule: Schedule,
    batches: Prefetch,
    device: Device,
    /// The processes that train together; rank 0 evaluates and writes files and messages.
    group: ProcessGroup,
    /// The latest update, as long as its numbers have not arrived from the device.
    running: Option<Running>,
    /// This rank's stop request, until the other ranks have been informed.
    own_stop: Option<Error>,
    /// The checkpoint from which this run continues, if it was saved only because the user stopped the run.
    pause: Option<PathBuf>,
    /// The name of the best checkpoint. The best score in `progress` is this checkpoint's.
    best: Option<String>,
    /// The time when the latest update's numbers arrived.
    last: Instant,
    /// (seconds, target tokens) of each of the latest updates.
    pace: std::collections::VecDeque<(f64, usize)>,
}

/// An update whose work has been queued on the device.
struct Running {
    number: u64,
    epoch: u64,
    lr: f64,
    tokens: usize,
    start: Instant,
    /// Four numbers: the sum of losses, the sum of NLL, the number of ranks that want to stop, and the gradient norm;
    /// with `qk_clip` also the largest logit.
    numbers: Pending,
    layers: Option<PendingLayers>,
    statistics: Option<Watched>,
}

/// The parts from which a trainer is built.
pub struct Parts {
    pub model: Transformer,
    /// True if the model has the weights of another run. These include its measured gains.
    pub has_given_weights: bool,
    pub config: TrainingConfig,
    /// The data options. Checkpoints store them, so that a resumed run can compare its own.
    pub data: DataConfig,
    pub objective: Objective,
    pub vocabulary: Vocabulary,
    pub validation: Validation,
    pub store: CheckpointStore,
    pub unigram_entropy: f64,
    /// The number of sentences in an epoch, and the number of batches.
    pub sentences: usize,
    pub batches_per_epoch: usize,
    pub text: Digests,
    pub device: Device,
    pub group: ProcessGroup,
    /// The recorder of CUDA graphs; `None` means that passes run eagerly.
    pub recorder: Option<Box<dyn Recorder>>,
}

/// Returns the type of matrix products.
pub(super) fn kind_of(precision: Precision) -> Kind {
    match precision {
        Precision::F32 => Kind::Float,
        Precision::Bf16 => Kind::BFloat16,
    }
}

/// The number of latest updates over which the reported speed is averaged.
const PACE: usize = 50;

impl Trainer {
    /// Builds a trainer at the start of a run, or with `from` at a checkpoint. `batches` begins at the cursor of the
    /// progress.
    pub fn new(parts: Parts, batches: Prefetch, from: Option<(Progress, &ResumePoint)>) -> Result<Self> {
        let Parts {
            model, config, data, objective, vocabulary, validation, store, unigram_entropy, device, group, ..
        } = parts;
        // Two kinds of passes cannot be recorded. A pass with statistics over several ranks involves more than one
        // device. In PowerNorm's release mode, padding rows would count as real.
        let is_recordable = !model.parameters.have_statistics()
            || group.is_alone() && model.config.options.get(&power_norm::MODE) == PowerNormMode::Paper;
        let recorder = parts.recorder.filter(|_| is_recordable);
        let graphs = recorder.map(|recorder| Graphs::new(recorder, config.max_tokens as usize, device));
        let mut optimizer = Optimizer::new(&model.parameters, &config, &model.config)?;
        let mut schedule = Schedule::new(&config, model.config.scaled().base_width);
        let mut progress = Progress::default();
        let (mut pause, mut best) = (None, None);
        if let Some((resumed, ResumePoint { path, checkpoint, best: named, .. })) = from {
            best.clone_from(named);
            optimizer.load(&checkpoint.optimizer)?;
            if let Some(memory) = &resumed.schedule {
                schedule.memory = memory.clone();
            }
            progress = resumed;
            pause = std::mem::take(&mut progress.is_pause).then(|| path.clone());
        }
        progress.keeps_gains |= parts.has_given_weights;
        progress.text = Some(parts.text);
        progress.seen.1 = parts.sentences as u64;
        let kind = kind_of(config.precision);
        optimizer.share_parameters(group)?;
        optimizer::begin(&model.parameters, &config)?;
        let updates_per_epoch = parts.batches_per_epoch as f64 / (config.accumulate * group.size() as i64) as f64;
        let (recompute, measures_logits) = (config.activation_checkpointing, config.qk_clip > 0.0);
        let flat = optimizer.flat(kind)?.map(Rc::new);
        // The initial model is not saved, so a resumed run rebuilds it from its first seed. The option `seed` may have
        // changed since.
        let is_watched = config.log_statistics > 0 && group.is_first();
        let first_seed = *progress.first_seed.get_or_insert(config.seed);
        let initial_model = || {
            let initial = Transformer::new(&model.config, first_seed, device, Kind::Float)?;
            optimizer::begin(&initial.parameters, &config)?;
            Ok::<_, Error>(initial)
        };
        let first = is_watched.then(initial_model).transpose()?;
        let workspace = RefCell::default();
        let train_step = TrainStep { model, objective, kind, recompute, measures_logits, group, flat, workspace };
        Ok(Trainer {
            config,
            data,
            progress,
            train_step: Rc::new(train_step),
            graphs,
            first,
            vocabulary,
            validation,
            store,
            unigram_entropy,
            updates_per_epoch,
            optimizer,
            schedule,
            batches,
            device,
            group,
            running: None,
            own_stop: None,
            pause,
            best,
            last: Instant::now(),
            pace: Default::default(),
        })
    }

    /// Trains until one of the stopping rules holds.
    pub fn fit(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.interruptible(observer, |t, observer| t.group.agree(observer.started(&t.started()), t.device))?;
        loop {
            let finished = self.finished();
            // The last update is always followed by an evaluation.
            if self.progress.is_due || finished.is_some() && self.progress.evaluated < self.progress.update {
                self.interruptible(observer, |t, observer| {
                    t.report_running(observer)?;
                    t.share_stops()?;
                    let evaluated = t.evaluate(observer);
                    t.group.agree(evaluated, t.device)
                })?;
                continue;
            }
            if let Some(reason) = finished {
                return observer.message("info", &format!("stopped: {reason}"));
            }
            let epoch_before = self.progress.cursor.epoch;
            // The update of the previous iteration, if its numbers have not been read yet.
            let previous = self.running.take();
            match self.whole_step() {
                Ok(running) => self.running = Some(running),
                Err(error @ Error::Raised(_)) if self.group.is_first() => {
                    // The other ranks wait for this one in the middle of an update, so this rank saves without them.
                    self.group = ProcessGroup::ALONE;
                    let reported = previous.map_or(Ok(()), |update| self.report(update, observer));
                    return self.interruptible(observer, |_, _| reported.and(Err(error)));
                }
                Err(error) => return Err(error),
            }
            self.progress.is_due = self.is_evaluation_due(epoch_before);
            // On a GPU the numbers of an update are read after the next update has been queued, so that the GPU never
            // idles.
            let mut reported = previous.map_or(Ok(()), |update| self.report(update, observer));
            if self.device == Device::Cpu || reported.is_err() {
                let latest_reported = self.report_running(observer);
                reported = reported.and(latest_reported);
            }
            self.interruptible(observer, |_, _| reported)?;
        }
    }

    /// Waits for the numbers of the running update, if there is one, and reports them.
    fn report_running(&mut self, observer: &mut dyn Observer) -> Result<()> {
        self.running.take().map_or(Ok(()), |update| self.report(update, observer))
    }

    /// Reports an update to the observer. The update's numbers include the number of ranks that want to stop, so the
    /// ranks exchange their requests only if this number is not 0.
    fn report(&mut self, update: Running, observer: &mut dyn Observer) -> Result<()> {
        let (update, a_rank_stops) = self.finish(update)?;
        let mut reported = observer.updated(&update);
        if let Some(complaint) = self.graphs.as_mut().and_then(Graphs::complaint) {
            reported = reported.and(observer.message("warning", &complaint));
        }
        if self.group.is_alone() {
            return reported;
        }
        if let Err(error) = reported {
            self.own_stop.get_or_insert(error);
        }
        match a_rank_stops {
            true => self.share_stops(),
            false => Ok(()),
        }
    }

    /// Exchanges the ranks' stop requests, and forgets this rank's. Returns an error on every rank if one of them wants
    /// to stop.
    fn share_stops(&mut self) -> Result<()> {
        self.group.agree(self.own_stop.take().map_or(Ok(()), Err), self.device)
    }

    /// Runs `work`. If the user wants to stop, or a Python function of the user has raised an exception, saves a
    /// checkpoint before returning the error.
    fn interruptible(
        &mut self,
        observer: &mut dyn Observer,
        work: impl FnOnce(&mut Self, &mut dyn Observer) -> Result<()>,
    ) -> Result<()> {
        match work(self, observer) {
            Err(error @ (Error::Interrupted(_) | Error::Raised(_))) => {
                let update = self.progress.update;
                // If this update has been evaluated, its checkpoint has been saved already.
                let is_saved = update > 0 && self.progress.evaluated == update;
                let (is_best, is_pause) = (false, true);
                let saved = if is_saved { Ok(()) } else { self.save(is_best, is_pause, observer) };
                // The error of a failed save comes before the message that everything is saved.
                let ended = saved.err().unwrap_or_else(|| {
                    Error::Interrupted(format!(
                        "stopped after update {update}; everything is saved: the same command with --resume goes on"
                    ))
                });
                Err(match error {
                    Error::Raised(raised) => Error::Raised(raised.ended(ended)),
                    _ => ended,
                })
            }
            other => other,
        }
    }

    /// Runs [`step`](Self::step). If a user's norm raises an exception, restores running statistics and counters.
    fn whole_step(&mut self) -> Result<Running> {
        let model = &self.train_step.model;
        let norms = [model.config.encoder_norm(), model.config.decoder_norm()];
        // Only a user's norm can raise within a step. Without one, no copies of the buffers are needed.
        if norms.iter().all(|name| given::find(name).is_none()) {
            return self.step();
        }
        // Pairs of a buffer and a copy of its present values.
        let buffers = model.parameters.buffers().map(|(_, t)| Ok((t.shallow_clone(), t.f_detach_copy()?)));
        let before = buffers.collect::<Result<Vec<_>>>()?;
        self.step().inspect_err(|_| {
            for (mut buffer, old) in before {
                // If the copy fails, too, the error that is already being returned is the more useful one.
                let _ = buffer.f_copy_(&old);
            }
        })
    }

    /// Makes one update: batches → model → loss → gradients → optimizer. Rank r of K processes every K-th micro-batch;
    /// a single process would process all of them with the same random numbers. The function does not wait for work on
    /// a GPU.
    fn step(&mut self) -> Result<Running> {
        let start = Instant::now();
        let number = self.progress.update + 1;
        let mut batches = Vec::new();
        let (mut cursor, mut seen) = (self.progress.cursor, self.progress.seen.0);
        let mut tokens = 0;
        let ranks = self.group.size();
        // An update has `accumulate` micro-batches of each rank. Every rank reads all micro-batches of the update, to
        // count their tokens, and keeps its own.
        for micro_batch in 0..self.config.accumulate as usize * ranks {
            let (batch, next) = self.batches.next().ok_or_else(|| Error::invalid("the stream of batches ended"))?;
            tokens += batch.target_output.len();
            // Index 0 means that this batch was its epoch's last.
            seen = if next.index == 0 { 0 } else { seen + batch.sentences.len() as u64 };
            if micro_batch % ranks == self.group.rank() {
                batches.push((micro_batch as i64, batch));
            }
            cursor = next;
        }
        // The gradients are those of the mean loss over all target tokens of the update.
        let (seed, scale) = (self.config.seed as i64, 1.0 / tokens as f64);
        self.train_step.model.set_update(number as i64)?;
        // Before the first update, the first rank measures the residual scheme's gains on its first micro-batch.
        if number == 1 && !self.progress.keeps_gains && self.train_step.model.is_profiled() {
            if let (true, (_, batch)) = (self.group.is_first(), &batches[0]) {
                // The seed of dropout is [seed, update, micro-batch].
                let turn = Turn { seed: [seed, 0, 0], scale, is_partial: false };
                let micro_batch = MicroBatch::on_host(batch, None, turn, self.device)?;
                self.train_step.profile(&micro_batch.to(self.device)?)?;
            }
            // All ranks get the gains that the first rank has measured.
            self.optimizer.share_parameters(self.group)?;
        }
        // The flat buffers have a copy of the parameters in the type of products.
        self.train_step.flat.as_ref().map_or(Ok(()), |flat| flat.refresh())?;
        let (_, first_batch) = &batches[0];
        let statistics = self.watched(number, first_batch, scale)?;
        let mut sums = None::<LossSums>;
        let last_index = batches.len() - 1;
        // Norms that count updates must know which micro-batch is the last of its update.
        let counts_updates = self.train_step.model.parameters.count_updates();
        for (i, (micro_batch, batch)) in batches.iter().enumerate() {
            let seed = [seed, number as i64, *micro_batch];
            let turn = Turn { seed, scale, is_partial: counts_updates && i < last_index };
            let micro_batch_sums = self.forward_backward(batch, turn)?;
            match &mut sums {
                Some(sums) => sums.merge(&micro_batch_sums)?,
                None => sums = Some(micro_batch_sums),
            }
        }
        let sums = sums.ok_or_else(|| Error::invalid("accumulate must be at least 1"))?;
        let lr = self.schedule.learning_rate(number);
        self.optimizer.join_ranks(self.group)?;
        let is_logged = self.group.is_first() && number.is_multiple_of(self.config.log_layers as u64);
        let (parameters, clip) = (&self.train_step.model.parameters, self.optimizer.qk_clip());
        let layers = is_logged.then(|| PendingLayers::of(parameters, clip)).transpose()?;
        let logit = clip.map(|clip| clip.largest_of_all()).transpose()?;
        // 1 if this rank wants to stop, else 0. The sum over ranks then counts such ranks, without another exchange.
        let wants_stop = sums.loss.f_full_like(f64::from(u8::from(self.own_stop.is_some())))?;
        let sums = self.group.sum(&Tensor::f_stack(&[&sums.loss, &sums.nll, &wants_stop], 0)?)?;
        let grad_norm = self.optimizer.step(number, lr, &sums.f_select(0, 0)?, self.group)?;
        // The numbers are concatenated in the order that `Running` states.
        let last_numbers = [Some(grad_norm), logit].into_iter().flatten().map(|t| t.f_reshape([1i64].as_slice()));
        let parts = [Ok(sums)].into_iter().chain(last_numbers).collect::<std::result::Result<Vec<_>, _>>()?;
        let numbers = Pending::of(&Tensor::f_cat(&parts, 0)?)?;
        self.progress.update = number;
        // The cursor's index is 0 when an epoch has just ended; then this update still belongs to that epoch.
        let epoch = if cursor.index == 0 { cursor.epoch } else { cursor.epoch + 1 };
        (self.progress.cursor, self.progress.seen.0) = (cursor, seen);
        Ok(Running { number, epoch, lr, tokens, start, numbers, layers, statistics })
    }

    /// Returns the numbers that `log_statistics` asks for, measured on the first batch of the update; `None` if none
    /// are due.
    fn watched(&self, number: u64, batch: &Batch, scale: f64) -> Result<Option<Watched>> {
        let Some(first) = &self.first else { return Ok(None) };
        if !number.is_multiple_of(self.config.log_statistics as u64) {
            return Ok(None);
        }
        // The seed of dropout is that of the update's first micro-batch.
        let turn = Turn { seed: [self.config.seed as i64, number as i64, 0], scale, is_partial: false };
        let batch = MicroBatch::on_host(batch, None, turn, self.device)?.to(self.device)?;
        watch(&self.train_step, first, &batch).map(Some)
    }

    /// Runs the forward and backward pass of a micro-batch, by a CUDA graph if there is one.
    fn forward_backward(&mut self, batch: &Batch, turn: Turn) -> Result<LossSums> {
        match &mut self.graphs {
            Some(graphs) => graphs.run(&self.train_step, batch, turn),
            None => self.train_step.run(&MicroBatch::on_host(batch, None, turn, self.device)?.to(self.device)?),
        }
    }

    /// Waits for an update's results. Returns them, and true if a rank wants to stop. Errors if the loss or the
    /// gradient norm is not finite.
    fn finish(&mut self, update: Running) -> Result<(Update, bool)> {
        let Running { number, epoch, lr, tokens, start, numbers, layers, statistics } = update;
        let numbers = numbers.read()?;
        // The numbers have the order that `Running` states.
        let (loss, nll, grad_norm) = (numbers[0] / tokens as f64, numbers[1] / tokens as f64, numbers[3]);
        let (a_rank_stops, largest_logit) = (numbers[2] > 0.0, numbers.get(4).copied());
        if !loss.is_finite() || !grad_norm.is_finite() {
            let (what, value) = if loss.is_finite() { ("gradient norm", grad_norm) } else { ("loss", loss) };
            return Err(self.diverged(what, number, value));
        }
        let now = Instant::now();
        // Updates overlap on a GPU, so only the time since the previous update's numbers arrived counts for this one.
        let seconds = (now - start.max(self.last)).as_secs_f64();
        self.last = now;
        self.progress.seconds += seconds;
        if self.pace.len() == PACE {
            self.pace.pop_front();
        }
        self.pace.push_back((seconds, tokens));
        let recent_seconds: f64 = self.pace.iter().map(|(seconds, _)| seconds).sum();
        let recent_tokens: usize = self.pace.iter().map(|(_, tokens)| tokens).sum();
        let updates_left = (self.config.updates - number as i64).max(0) as f64;
        let time_left = updates_left * recent_seconds / self.pace.len() as f64;
        let update = Update {
            update: number,
            epoch,
            loss,
            nll,
            lr,
            grad_norm,
            largest_logit,
            tokens,
            tokens_per_second: recent_tokens as f64 / recent_seconds,
            seconds: self.progress.seconds,
            time_left: (self.config.updates > 0).then_some(time_left),
            layers: layers.map(PendingLayers::read).transpose()?,
            statistics,
        };
        Ok((update, a_rank_stops))
    }

    /// Returns the error for a loss or norm `what` whose value is not finite.
    fn diverged(&self, what: &str, update: u64, value: f64) -> Error {
        let kept = match self.store.list().unwrap_or_default().last() {
            Some(last) => format!("the checkpoint of update {last} is untouched"),
            None => "no checkpoint had been written yet".to_string(),
        };
        Error::Diverged(format!(
            "the {what} after update {update} is {value}; {kept}. Try a lower lr, a longer warmup, or clip_norm"
        ))
    }

    /// True if an evaluation is due: after `evaluate_every` updates, or if that is 0, at the end of an epoch.
    fn is_evaluation_due(&self, epoch_before: u64) -> bool {
        match self.config.evaluate_every {
            0 => self.progress.cursor.epoch > epoch_before,
            every => self.progress.update.is_multiple_of(every as u64),
        }
    }

    /// Computes the validation loss and BLEU, then saves a checkpoint. Running statistics may differ between ranks,
    /// so all ranks use rank 0's results.
    pub fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let start = Instant::now();
        let measured = if self.group.is_first() { self.measure(observer) } else { Ok((Score::default(), None)) };
        // Ctrl-C reaches every rank. The ranks that only waited consume their signal here, so that it does not stop
        // them a second time.
        let agreed = self.group.agree(measured, self.device).inspect_err(|_| drop(observer.check_interrupt()));
        let (score, bleu) = agreed?;
        // NaN stands for a BLEU that was not measured.
        let numbers = [score.loss, score.nll, score.tokens as f64, bleu.unwrap_or(f64::NAN)];
        let [loss, nll, tokens, bleu] = self.group.first_of(numbers, self.device)?;
        let (score, bleu) = (Score { loss, nll, tokens: tokens as usize }, Some(bleu).filter(|bleu| !bleu.is_nan()));
        if !score.loss.is_finite() {
            return Err(self.diverged("validation loss", self.progress.update, score.loss));
        }
        // A higher number is better.
        let criterion = match (self.config.criterion, bleu) {
            (Criterion::Bleu, Some(bleu)) => bleu,
            _ => -score.loss,
        };
        // The schedules val-decay and no-warmup use BLEU if it is measured (docs/spec.md §4.10).
        self.schedule.evaluated(self.progress.update, bleu.unwrap_or(-score.loss));
        let best = self.progress.best.is_none_or(|best_so_far| criterion > best_so_far);
        self.progress.evaluations += 1;
        self.progress.since_best = if best { 0 } else { self.progress.since_best + 1 };
        if best {
            self.progress.best = Some(criterion);
        }
        (self.progress.is_due, self.progress.evaluated) = (false, self.progress.update);
        // The line is logged before the checkpoint is saved: a crash may then repeat a line, but never lose one.
        let reported = observer.evaluated(&self.evaluation(score, bleu, best, start));
        if let Err(error @ Error::Io { .. }) = reported {
            // The log lacks the line, so nothing is saved: a resumed run makes the evaluation again and logs it.
            return Err(error);
        }
        let is_pause = false;
        self.save(best, is_pause, observer)?;
        if self.group.is_first() {
            self.store.prune(self.config.keep.max(1) as usize)?;
        }
        reported
    }

    /// Measures the validation loss, and BLEU if the loss is finite. Warns about norms that have ignored batches,
    /// because the batches' statistics were not finite.
    fn measure(&self, observer: &mut dyn Observer) -> Result<(Score, Option<f64>)> {
        let TrainStep { model, objective, kind, .. } = &*self.train_step;
        let score = evaluate_loss(model, &self.validation.batches, objective, *kind, || observer.check_interrupt())?;
        for (norm, batches) in self.train_step.model.parameters.take_refused()? {
            let text = format!("{norm}: the statistics of {batches} batches were not finite and were not taken in");
            observer.message("warning", &text)?;
        }
        let bleu = if score.loss.is_finite() { self.bleu(observer)? } else { None };
        Ok((score, bleu))
    }

    /// Returns the event of an evaluation that began at `start`.
    fn evaluation(&self, score: Score, bleu: Option<f64>, best: bool, start: Instant) -> Evaluation {
        let cursor = self.progress.cursor;
        Evaluation {
            update: self.progress.update,
            // The cursor's index is 0 when an epoch has just ended; then the latest update still belongs to that epoch.
            epoch: if cursor.index == 0 { cursor.epoch } else { cursor.epoch + 1 },
            loss: score.loss,
            nll: score.nll,
            perplexity: score.perplexity(),
            bleu,
            best,
            seconds: start.elapsed().as_secs_f64(),
        }
    }

    /// Returns BLEU of the translations of the validation set; `None` without references.
    fn bleu(&self, observer: &mut dyn Observer) -> Result<Option<f64>> {
        if self.validation.references.is_empty() {
            return Ok(None);
        }
        let search =
            SearchConfig { beam: self.config.evaluation_beam as usize, ..SearchConfig::new(SearchRule::Google) };
        let mask = self.train_step.objective.mask.as_ref();
        let (model, kind) = (&self.train_step.model, self.train_step.kind);
        let check_interrupt = || observer.check_interrupt();
        evaluate_bleu(model, &self.validation, &self.vocabulary, mask, &search, kind, check_interrupt).map(Some)
    }

    /// Saves a checkpoint of the current state, which becomes the last one, and the best one if `best` is true.
    /// `is_pause` marks a checkpoint that is saved only because the user wants to stop.
    fn save(&mut self, best: bool, is_pause: bool, observer: &mut dyn Observer) -> Result<()> {
        self.progress.is_pause = is_pause;
        self.progress.schedule = Some(self.schedule.memory.clone());
        let saved = if self.group.is_first() { self.write(best) } else { Ok(()) };
        self.pause = None;
        self.group.agree(saved, self.device)?;
        let reported = observer.saved(&Saved { update: self.progress.update });
        self.group.agree(reported, self.device)
    }

    /// Writes a checkpoint, which becomes the best one if `best` is true. Then removes the one from which this run was
    /// resumed, if that was saved only because the user had stopped the run.
    fn write(&mut self, best: bool) -> Result<()> {
        let not_written = |e: serde_json::Error| Error::invalid(format!("the state cannot be written: {e}"));
        let checkpoint = Checkpoint {
            model: to_arrays(&self.train_step.model.parameters)?,
            optimizer: self.optimizer.to_arrays()?,
            state: serde_json::to_value(&self.progress).map_err(not_written)?,
            config: serde_json::json!({
                "model": self.train_step.model.config, "training": self.config, "data": self.data
            }),
        };
        let is_best = if best { Best::This } else { Best::Named(self.best.as_deref()) };
        let name = self.store.save(self.progress.update, &checkpoint, is_best)?;
        if best {
            self.best = Some(name);
        }
        self.pause.as_deref().map_or(Ok(()), |pause| self.store.discard(pause))
    }

    /// Returns the reason why the run is over; `None` if it is not.
    fn finished(&self) -> Option<String> {
        let (config, progress) = (&self.config, &self.progress);
        if config.updates > 0 && progress.update >= config.updates as u64 {
            return Some(format!("{} updates are done", progress.update));
        }
        if config.epochs > 0 && progress.cursor.epoch >= config.epochs as u64 {
            return Some(format!("{} epochs are done", progress.cursor.epoch));
        }
        if config.patience > 0 && progress.since_best >= config.patience as u64 {
            return Some(format!("{} evaluations without a better one", progress.since_best));
        }
        let next = progress.update + 1;
        let lr = self.schedule.learning_rate(next);
        if lr < config.min_lr && self.schedule.may_stop(next) {
            return Some(format!("the learning rate {lr:.2e} is below min_lr {:.2e}", config.min_lr));
        }
        None
    }

    /// Returns the event before the first update.
    fn started(&self) -> Started {
        let vocabulary = self.vocabulary.len();
        // The number of entries in the target vocabulary.
        let allowed = |mask: &Tensor| mask.f_sum(Kind::Int64).and_then(|n| n.f_int64_value(&[])).unwrap_or(0) as usize;
        Started {
            parameters: self.train_step.model.parameters.numel(),
            updates_per_epoch: self.updates_per_epoch,
            update: self.progress.update,
            updates: self.config.updates,
            vocabulary,
            target_vocabulary: self.train_step.objective.mask.as_ref().map_or(vocabulary, allowed),
            device: self.config.device.clone(),
            ranks: self.group.size(),
            precision: self.config.precision,
            threads: crate::cpu::parallel::threads(),
            unigram_entropy: self.unigram_entropy,
        }
    }
}
