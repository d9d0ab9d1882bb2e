//! Training: starts or resumes a run, from text files to the run's folder.

use super::folder::{check_beginning, check_checkpoints, read_mask, resume, Beginning, Log, ResumeState};
use super::init_from;
use super::lock::Lock;
use super::prepare::{prepare_with, valid_batches};
use super::{device, Mode, PreparedData};
use crate::config::resume::{other_validation, Effect, OptionChange};
use crate::config::{DataConfig, Precision, TrainingConfig, TransformerConfig};
use crate::cpu::simd::has_bf16_products;
use crate::cpu::{contention, pages};
use crate::cuda;
use crate::data::{BatchStream, Corpus, Cursor, Digests, Interrupt, Limit, Prefetch, StreamConfig};
use crate::error::{quoted, Error, Result};
use crate::metrics::unigram_entropy;
use crate::model::Transformer;
use crate::operator::ProcessGroup;
use crate::ownership::{CONFIG, LOG};
use crate::train::checkpoint::{CheckpointStore, ResumePoint};
use crate::train::{
    load_parameters, smoothing, Objective, Observer, Parts, Progress, Recorder, Schedule, Trainer, Validation,
};
use std::path::Path;
use std::sync::Arc;
use tch::{Device, Kind, Tensor};

/// The parts of a training run that are not options.
pub struct Surroundings<'a> {
    /// The processes that train together.
    pub group: ProcessGroup,
    /// A function that creates the recorder of CUDA graphs for a device.
    pub recorder: Option<fn(Device) -> Box<dyn Recorder>>,
    /// The run whose weights a new run begins with, as RUN or RUN:CHECKPOINT; `None` to initialise the weights.
    pub init_from: Option<&'a str>,
    pub observer: &'a mut dyn Observer,
}

/// Trains a model. Afterwards `output` holds everything that [`Translator`](super::Translator) needs. All processes
/// of the group call this function with the same arguments. Only the first process writes files. The observer of each
/// process gets events, and may stop the run.
pub fn train(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    output: &Path,
    mode: Mode,
    surroundings: Surroundings,
) -> Result<()> {
    let Surroundings { group, recorder, init_from, observer } = surroundings;
    pages::keep_memory();
    // Measures until the end of the run how long threads wait for each other.
    let _watch = contention::watch();
    let device = device(&training.device)?;
    // The folder is locked before any data are read, so that a second run in it is refused at once.
    let lock = match group.is_first() {
        true => Lock::take(output).map(Some),
        false => Ok(None),
    };
    // If one rank has an error, `agree` returns an error on every rank, so that no rank waits for it in vain.
    let lock = group.agree(lock, device)?;
    if init_from.is_some() && matches!(mode, Mode::Resume { .. }) {
        return Err(Error::invalid(
            "init_from begins a new run, and resume goes on with one that has its weights: leave one of them out",
        ));
    }
    let opened = open(model, training, config, output, &mode, &mut || observer.check_interrupt());
    // `from` is the checkpoint to continue from, and `changes` the options that differ from that checkpoint's.
    let (mut prepared, from, changes) = group.agree(opened, device)?;
    let (skipped, all) = (prepared.skipped, prepared.skipped + prepared.train.len());
    let is_new = !matches!(mode, Mode::Resume { .. });
    let beginning = (is_new && group.is_first()).then(|| Beginning::of(&mut prepared, training, config));
    let mut warnings = from.as_ref().map_or(Vec::new(), |resume_point| resume_point.passed.clone());
    warnings.append(&mut prepared.warnings);
    if let Some(resume_point) = from.as_ref().filter(|resume_point| !resume_point.passed.is_empty()) {
        warnings.push(format!("the run goes on from the checkpoint before: {}", resume_point.path.display()));
    }
    if !is_new && from.is_none() {
        warnings.push("the run had saved no checkpoint: it begins at its first update".into());
    }
    let recorder = recorder.filter(|_| training.cuda_graphs && has_kernels(device)).map(|recorder| recorder(device));
    let limit = prepared.limit;
    let origin = InitialState { from, changes, init_from };
    let built = trainer(prepared, training, config, output, device, (group, recorder), origin, &mut warnings);
    let mut trainer = group.agree(built, device)?;
    let written = match beginning {
        Some(beginning) => beginning.write(output, &mode),
        None if group.is_first() => CheckpointStore::open(output).map(drop),
        None => Ok(()),
    };
    group.agree(written, device)?;
    let mut log = group.agree(Log::append(group.is_first().then(|| output.join(LOG)), observer), device)?;
    if training.precision == Precision::Bf16 && device == Device::Cpu && !has_bf16_products() {
        warnings.push(
            "this processor has no instructions for products of bf16: training is faster with precision f32 (three times \
             where it was measured)"
                .into(),
        );
    }
    if lock.as_ref().is_some_and(|lock| !lock.is_exclusive) {
        warnings.push(format!("{}: its file system has no locks; start no second run there", output.display()));
    }
    warnings.iter().try_for_each(|text| log.message("warning", text))?;
    if skipped > 0 {
        let Limit { tokens, what, flag } = limit;
        let text = format!("left out {skipped} of {all} sentences: longer than {what} of {flag} {tokens}");
        log.message("warning", &text)?;
    }
    trainer.fit(&mut log)
}

/// Returns true if our CUDA kernels run on the device. Otherwise PyTorch's operations run, some of which wait for the
/// device, so that no CUDA graph can record them.
fn has_kernels(device: Device) -> bool {
    match device {
        Device::Cuda(index) => matches!(cuda::readiness(index as cuda::Device), Ok(cuda::Readiness::Ready)),
        _ => cuda::stand_in(),
    }
}

/// Prepares the data of a run that starts or is resumed. Returns the data, the checkpoint from which to continue, and
/// the options that differ from that checkpoint's. Writes nothing.
fn open(
    model: &TransformerConfig,
    training: &TrainingConfig,
    config: &DataConfig,
    output: &Path,
    mode: &Mode,
    check_interrupt: Interrupt,
) -> Result<(PreparedData, Option<ResumePoint>, Vec<OptionChange>)> {
    match mode {
        Mode::New | Mode::Overwrite => {
            check_beginning(output, mode)?;
            Beginning::check(model, training, config)?;
            Schedule::new(training, model.scaled().base_width).check_beginning(training)?;
        }
        Mode::Resume { .. } if !output.join(CONFIG).exists() => {
            return Err(Error::invalid(format!(
                "{} holds no run to resume: leave out --resume to start one",
                output.display()
            )))
        }
        _ => {}
    }
    check_checkpoints(output)?;
    let (known, resume_point, mut changes) = match mode {
        Mode::Resume { from } => {
            let ResumeState { segmenter, vocabulary, resume_point, changes } =
                resume(model, training, config, output, from.as_deref())?;
            (Some((segmenter, vocabulary)), resume_point, changes)
        }
        _ => (None, None, Vec::new()),
    };
    let is_resumed = known.is_some();
    let prepared = prepare_with(model, training, config, known, check_interrupt).map_err(|e| match e {
        Error::Interrupted(_) => Error::Interrupted("stopped while the data were prepared; nothing was written".into()),
        other => other,
    })?;
    if let (true, Some(mask)) = (is_resumed, &prepared.mask) {
        if *mask != read_mask(output, &prepared.vocabulary)? {
            return Err(Error::invalid(format!(
                "{} was trained on text with other target types than train_target's: resume with the same text",
                output.display()
            )));
        }
    }
    if let Some(resume_point) = &resume_point {
        let valid = read_progress(resume_point)?.text.map(|text| text.valid);
        if valid.is_some_and(|valid| valid != prepared.digests.valid) {
            changes.push(other_validation());
        }
    }
    Ok((prepared, resume_point, changes))
}

/// The origin of a run's initial state: a checkpoint of its own, another run's weights, or nothing.
struct InitialState<'a> {
    /// The checkpoint of the run itself from which it continues.
    from: Option<ResumePoint>,
    /// The options that differ from the checkpoint's.
    changes: Vec<OptionChange>,
    /// The other run, as RUN or RUN:CHECKPOINT.
    init_from: Option<&'a str>,
}

/// Builds the trainer. Appends to `warnings` what the user should know of its initial state.
fn trainer(
    prepared: PreparedData,
    training: &TrainingConfig,
    config: &DataConfig,
    output: &Path,
    device: Device,
    (group, recorder): (ProcessGroup, Option<Box<dyn Recorder>>),
    InitialState { from, changes, init_from }: InitialState,
    warnings: &mut Vec<String>,
) -> Result<Trainer> {
    let objective = objective(&prepared, training, device)?;
    let PreparedData { model, vocabulary, train, valid, references, digests, .. } = prepared;
    let tokenize = training.evaluation_tokenize;
    // The state of the run at the checkpoint, and the checkpoint.
    let mut from = match from {
        Some(resume_point) => Some((read_progress(&resume_point)?, resume_point)),
        None => None,
    };
    let model = match &from {
        Some((_, resume_point)) => {
            Transformer::to_train(&model, &load_parameters(&resume_point.checkpoint.model, device)?)?
        }
        None => Transformer::new(&model, training.seed, device, Kind::Float)?,
    };
    let model = match init_from.map(init_from::parse) {
        Some(named) => {
            let (model, mut more) = init_from::with_weights_of(model, &vocabulary, named, device)?;
            warnings.append(&mut more);
            model
        }
        None => model,
    };
    let entropy = unigram_entropy(train.predicted());
    let batches = valid_batches(&valid, training);
    let stream_config = StreamConfig {
        max_tokens: training.max_tokens as usize,
        seed: training.seed,
        word_dropout: training.word_dropout,
    };
    let train = Arc::new(train);
    let stream = match &mut from {
        None => BatchStream::new(train.clone(), stream_config, Cursor::default())?,
        Some((progress, resume_point)) => {
            warnings.extend(progress.forget(&changes, training.criterion, !references.is_empty()));
            resumed_stream(&train, stream_config, digests, progress, resume_point, &changes, warnings)?
        }
    };
    let parts = Parts {
        model,
        has_given_weights: init_from.is_some(),
        config: training.clone(),
        data: config.clone(),
        objective,
        vocabulary,
        validation: Validation { batches, references, tokenize },
        store: CheckpointStore::at(output),
        unigram_entropy: entropy,
        sentences: train.len(),
        batches_per_epoch: stream.batches_per_epoch(),
        text: digests,
        device,
        group,
        recorder,
    };
    Trainer::new(parts, Prefetch::new(stream)?, from.as_ref().map(|(p, resume_point)| (p.clone(), resume_point)))
}

/// Returns the loss function, over the target vocabulary of the data.
pub(super) fn objective(prepared: &PreparedData, training: &TrainingConfig, device: Device) -> Result<Objective> {
    let mask = prepared.mask.as_ref();
    let entries = mask.map_or(prepared.vocabulary.len(), |mask| mask.iter().filter(|allowed| **allowed).count());
    let mask = mask.map(|mask| Tensor::f_from_slice(mask)?.f_to_device(device)).transpose()?;
    let mut objective = Objective::new(mask, smoothing(training, entries))?;
    objective.z_loss = training.z_loss;
    Ok(objective)
}

/// Returns the state of the run that a checkpoint stores. Errors if the checkpoint is only a model, or if its state
/// cannot be a run's.
fn read_progress(resume_point: &ResumePoint) -> Result<Progress> {
    if resume_point.checkpoint.optimizer.is_empty() {
        return Err(Error::invalid(format!(
            "{} is a model without a training's state (averaged or converted): translate or generate with it, or begin a \
             new run with its weights (--init-from {})",
            resume_point.path.display(),
            quoted(&resume_point.path.display().to_string())
        )));
    }
    let wrong = |why: String| {
        let path = resume_point.path.display();
        Error::invalid(format!("{path}: the state of the run cannot be read: {why}; use another checkpoint"))
    };
    let progress: Progress =
        serde_json::from_value(resume_point.checkpoint.state.clone()).map_err(|e| wrong(e.to_string()))?;
    match [progress.update, progress.cursor.epoch].into_iter().find(|n| *n > MOST) {
        Some(n) => Err(wrong(format!("expected an update and an epoch of at most {MOST}, found {n}"))),
        None => Ok(progress),
    }
}

/// An upper bound for the updates and epochs of any run. A state with a larger number is damaged or forged.
const MOST: u64 = 1 << 48;

/// Returns the batches that follow the run's position in its epoch. If the batches have changed, the new position is
/// the one after the same share of the epoch's sentences; a warning then says so. `progress` gets the new position.
fn resumed_stream(
    train: &Arc<Corpus>,
    config: StreamConfig,
    digests: Digests,
    progress: &mut Progress,
    resume_point: &ResumePoint,
    changes: &[OptionChange],
    warnings: &mut Vec<String>,
) -> Result<BatchStream> {
    // Checkpoints of earlier versions have no digests of their text.
    let is_same_text = progress.text.is_none_or(|text| text.train == digests.train);
    // The reasons why the batches of the epoch have changed. `Effect::Place` marks options that change them.
    let mut reasons: Vec<&str> =
        changes.iter().filter(|c| c.effects.contains(&Effect::Place)).map(|c| &*c.said).collect();
    if !is_same_text {
        reasons.push("the training text is not the one that the run was trained on");
    }
    let old_cursor = progress.cursor;
    if reasons.is_empty() {
        let stream = BatchStream::new(train.clone(), config, old_cursor)?;
        progress.seen.0 = stream.seen() as u64;
        return Ok(stream);
    }
    // The number of the epoch's sentences that the run has seen, and of all, both before the change.
    let (seen, all) = progress.seen;
    if all == 0 {
        let path = resume_point.path.display();
        return Err(Error::invalid(format!(
            "{path}: the state of the run does not count sentences; use another checkpoint"
        )));
    }
    let share = seen as f64 / all as f64;
    let epoch_start = Cursor { epoch: old_cursor.epoch, index: 0 };
    let stream = BatchStream::new(train.clone(), config, epoch_start)?.behind(share);
    let (new_cursor, seen) = (stream.cursor(), stream.seen());
    // A run that has just ended an epoch of the same text has nothing to skip or repeat, so no warning is due.
    if old_cursor.index > 0 || !is_same_text {
        warnings.push(format!(
            "{}: the run goes on in epoch {} behind {seen} of {} sentences, as {:.1} % of the epoch was seen",
            reasons.join("; "),
            new_cursor.epoch + 1,
            train.len(),
            100.0 * share
        ));
    }
    (progress.cursor, progress.seen.0) = (new_cursor, seen as u64);
    Ok(stream)
}
