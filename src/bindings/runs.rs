//! Functions on trained runs: translations, losses, averages, parameters and vocabularies.

use super::{check_signals, json_text, kind, named, released};
use crate::config::{self, GenerationOptions, SearchOptions, TrainingConfig, TransformerConfig};
use crate::cpu::pages;
use crate::data::{self, Binarised, Bpe};
use crate::error::Error;
use crate::search::SearchConfig;
use crate::{metrics, run, train};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// The text to translate.
#[derive(FromPyObject)]
enum SourceText {
    /// A split of a folder that fairseq has binarised: (data_bin, split, source_lang, target_lang).
    Binarised(String, String, Option<String>, Option<String>),
    Lines(Vec<String>),
}

/// Returns the best translations of each sentence, as tuples (text, score, finished). `search` is JSON; `batch_tokens`
/// is the number of padded source tokens in a batch.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn translate(
    py: Python<'_>,
    model_dir: &str,
    source: SourceText,
    search: &str,
    checkpoint: &str,
    batch_tokens: usize,
    precision: &str,
    device: &str,
) -> PyResult<Vec<Vec<(String, f64, bool)>>> {
    let search = SearchConfig::of(&config::from_json::<SearchOptions>("search", search)?)?;
    let kind = kind(precision)?;
    let translations = interruptible(py, "translation", |check_interrupt| {
        let translator = run::Translator::load(Path::new(model_dir), checkpoint, run::device(device)?)?;
        let source = match source {
            SourceText::Lines(lines) => translator.encode(&lines, &mut data::throttled(check_interrupt))?,
            SourceText::Binarised(folder, split, source, target) => {
                let data = Binarised::parallel(folder, &split, source.as_deref(), target.as_deref())?;
                translator.read(&data, &split, &mut data::throttled(check_interrupt))?
            }
        };
        translator.translate(source, &search, batch_tokens, kind, check_interrupt)
    })?;
    let tuple = |run::Translation { text, score, finished }| (text, score, finished);
    Ok(translations.into_iter().map(|of_sentence| of_sentence.into_iter().map(tuple).collect()).collect())
}

/// Runs `work` without the GIL. `work` calls its argument now and then, which runs Python's signal handlers. Ctrl-C
/// becomes the error `Interrupted`; another exception of a handler is raised. `what` names the work in messages.
pub(super) fn interruptible<T: Send>(
    py: Python<'_>,
    what: &str,
    work: impl FnOnce(&mut dyn FnMut() -> crate::error::Result<()>) -> crate::error::Result<T> + Send,
) -> PyResult<T> {
    let mut raised = None;
    let done = released(py, || {
        work(&mut || {
            Python::with_gil(check_signals).map_err(|error| {
                raised = Some(error);
                Error::Interrupted(format!("{what} was stopped"))
            })
        })
    });
    // An exception that passed through the work as an error also gets the error with which the work ended.
    let done = done.map_err(|error| match error {
        Error::Raised(raised) => Error::Raised(raised.ended(Error::Interrupted(format!("{what} was stopped")))),
        other => other,
    });
    as_raised(py, done, raised)
}

/// Converts the result of work that a Python exception, `raised`, may have ended. Returns that exception; for a
/// KeyboardInterrupt it returns the error `Interrupted` instead, which says what was saved. If saving failed, its error
/// becomes the cause of the exception.
pub(super) fn as_raised<T>(py: Python<'_>, done: crate::error::Result<T>, raised: Option<PyErr>) -> PyResult<T> {
    // The exception may have passed through the work as an error (`Error::Raised`). Then its field `ended` holds the
    // error with which the work ended, for example while it saved a checkpoint. Without one, the work was only stopped.
    let (done, raised) = match (done, raised) {
        (Err(Error::Raised(mut inside)), None) => {
            let ended = inside.ended.take();
            (
                ended.map_or(Err(Error::Interrupted("stopped".into())), |ended| Err(*ended)),
                Some(Error::Raised(inside).into()),
            )
        }
        both => both,
    };
    // A KeyboardInterrupt is left out: the error `Interrupted` in `done` replaces it.
    match (done, raised.filter(|error| !error.is_instance_of::<PyKeyboardInterrupt>(py))) {
        (Err(Error::Interrupted(_)), Some(raised)) => Err(raised),
        (Err(failed), Some(raised)) => {
            raised.set_cause(py, Some(failed.into()));
            Err(raised)
        }
        (done, _) => Ok(done?),
    }
}

/// Averages the last `count` checkpoints, or the checkpoints of the given updates, and returns the path of the
/// average.
#[pyfunction]
#[pyo3(signature = (model_dir, count=None, updates=None))]
fn average(py: Python<'_>, model_dir: &str, count: Option<usize>, updates: Option<Vec<u64>>) -> PyResult<String> {
    let path = interruptible(py, "averaging", |check_interrupt| {
        run::average(Path::new(model_dir), count, updates, check_interrupt)
    })?;
    Ok(path.display().to_string())
}

/// Returns (loss, nll, perplexity, tokens) of the text in the files `source` and `target`. A language model has no
/// source. The result is no JSON, because JSON has no infinity.
#[pyfunction]
#[pyo3(signature = (model_dir, source, target, checkpoint, precision, device))]
fn evaluate_loss(
    py: Python<'_>,
    model_dir: &str,
    source: Option<&str>,
    target: &str,
    checkpoint: &str,
    precision: &str,
    device: &str,
) -> PyResult<(f64, f64, f64, usize)> {
    let kind = kind(precision)?;
    let score = interruptible(py, "evaluation", |check_interrupt| {
        let translator = run::Translator::load(Path::new(model_dir), checkpoint, run::device(device)?)?;
        translator.evaluate(source, target, kind, check_interrupt)
    })?;
    Ok((score.loss, score.nll, score.perplexity(), score.tokens))
}

/// A continuation: (text, log p, tokens, finished).
type Text = (String, f64, usize, bool);

/// Returns the continuations of each prompt. `said` is called with the prompt's index, the sample's index and each
/// new piece of text, or None at the end of a sample. If `said` raises an exception, the generation ends.
/// `batch_tokens` is the number of tokens of all windows in a batch.
#[pyfunction]
#[pyo3(signature = (model_dir, prompts, generation, said, checkpoint, batch_tokens, precision, device))]
#[allow(clippy::too_many_arguments)]
fn generate(
    py: Python<'_>,
    model_dir: &str,
    prompts: Vec<String>,
    generation: &str,
    said: Option<PyObject>,
    checkpoint: &str,
    batch_tokens: usize,
    precision: &str,
    device: &str,
) -> PyResult<Vec<Vec<Text>>> {
    let options: GenerationOptions = config::from_json("generation", generation)?;
    options.validate()?;
    let kind = kind(precision)?;
    let mut raised = None;
    let mut report = |prompt: usize, sample: usize, text: Option<&str>| match &said {
        None => Ok(()),
        Some(said) => Python::with_gil(|py| said.call1(py, (prompt, sample, text)).map(drop)).map_err(|error| {
            raised = Some(error);
            Error::Interrupted("generation was stopped".into())
        }),
    };
    let completions = interruptible(py, "generation", |check_interrupt| {
        let model = run::Translator::load(Path::new(model_dir), checkpoint, run::device(device)?)?;
        model.complete(&prompts, &options, batch_tokens, kind, &mut report, check_interrupt)
    });
    // If `said` raised an exception, that counts, not the error that it caused in `completions`.
    match raised {
        Some(_) => as_raised(py, Err(Error::Interrupted("generation was stopped".into())), raised),
        None => Ok(completions?.into_iter().map(|texts| texts.into_iter().map(text_tuple).collect()).collect()),
    }
}

/// Converts a completion to the tuple that Python gets.
fn text_tuple(run::Completion { text, log_probability, tokens, finished }: run::Completion) -> Text {
    (text, log_probability, tokens, finished)
}

/// The scores of a text: (nll, perplexity, tokens, words, word_perplexity, lines, characters, bits_per_character).
type WindowNumbers = (f64, f64, usize, usize, f64, usize, usize, f64);

/// Computes the perplexity of the text file `text` with a sliding window of `window` tokens, which moves by `stride`.
#[pyfunction]
#[allow(clippy::too_many_arguments)]
fn evaluate_windows(
    py: Python<'_>,
    model_dir: &str,
    text: &str,
    window: Option<i64>,
    stride: Option<i64>,
    checkpoint: &str,
    precision: &str,
    device: &str,
) -> PyResult<WindowNumbers> {
    let kind = kind(precision)?;
    let result = interruptible(py, "evaluation", |check_interrupt| {
        let model = run::Translator::load(Path::new(model_dir), checkpoint, run::device(device)?)?;
        model.evaluate_windows(text, window, stride, kind, check_interrupt)
    })?;
    let (score, per_word, bits) = (result.score, result.word_perplexity(), result.bits_per_character());
    let run::WindowScore { words, lines, characters, .. } = result;
    Ok((score.nll, score.perplexity(), score.tokens, words, per_word, lines, characters, bits))
}

/// Returns the token ids of lines, without EOS, in the vocabulary of the run's model.
#[pyfunction]
fn encode(py: Python<'_>, model_dir: &str, lines: Vec<String>) -> PyResult<Vec<Vec<u32>>> {
    interruptible(py, "encoding", |check_interrupt| run::encode(Path::new(model_dir), &lines, check_interrupt))
}

/// Loads a trained model. Returns its options as JSON, and its parameters and buffers by name. Names and shapes have
/// been checked against the options.
#[pyfunction]
fn load_model(py: Python<'_>, model_dir: &str, checkpoint: &str) -> PyResult<(String, Vec<(String, PyTensor)>)> {
    let (config, tensors) = released(py, || run::load_model(Path::new(model_dir), checkpoint))?;
    Ok((json_text(&config)?, tensors.into_iter().map(|(name, t)| (name, PyTensor(t))).collect()))
}

/// Writes a run's folder for a model that was trained elsewhere. `dictionary` is the path of the model's dict.txt.
/// `target_vocabulary` has a flag for each vocabulary entry; None if the model may predict all of them.
#[pyfunction]
#[pyo3(signature = (output, model, training, dictionary, target_vocabulary, names, tensors))]
#[allow(clippy::too_many_arguments)]
fn save_model(
    py: Python<'_>,
    output: &str,
    model: &str,
    training: &str,
    dictionary: &str,
    target_vocabulary: Option<Vec<bool>>,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
) -> PyResult<()> {
    let model: TransformerConfig = config::from_json("model", model)?;
    let training: TrainingConfig = config::from_json("training", training)?;
    let tensors = named(names, tensors);
    let (output, dictionary) = (Path::new(output), Path::new(dictionary));
    released(py, move || {
        run::save_model(output, &model, &training, dictionary, target_vocabulary.as_deref(), &tensors)
    })?;
    Ok(())
}

/// Writes a folder with tensors (as model.safetensors) and text files. The folder is complete or does not exist.
#[pyfunction]
fn write_arrays(
    py: Python<'_>,
    output: &str,
    texts: BTreeMap<String, String>,
    names: Vec<String>,
    tensors: Vec<PyTensor>,
) -> PyResult<()> {
    let tensors = named(names, tensors);
    released(py, move || {
        let arrays = tensors.into_iter().map(|(name, t)| Ok((name, train::checkpoint::to_array(&t)?)));
        train::checkpoint::write_arrays(Path::new(output), &arrays.collect::<crate::error::Result<_>>()?, &texts)
    })?;
    Ok(())
}

/// Returns a run's target vocabulary as a flag for each vocabulary entry; None if every entry is in it.
#[pyfunction]
fn target_vocabulary(model_dir: &str) -> PyResult<Option<Vec<bool>>> {
    Ok(run::target_vocabulary(Path::new(model_dir))?)
}

/// Returns the options {model, training, data} stored in a run's checkpoint (default: the newest) as JSON; null if
/// the run has no checkpoint.
#[pyfunction]
#[pyo3(signature = (model_dir, from_checkpoint=None))]
fn run_options(model_dir: &str, from_checkpoint: Option<&str>) -> PyResult<String> {
    json_text(&run::options(Path::new(model_dir), from_checkpoint)?)
}

/// Errors if files in a run's folder are damaged.
#[pyfunction]
fn check_run(model_dir: &str) -> PyResult<()> {
    Ok(run::check(Path::new(model_dir))?)
}

/// True if a run wrote the file at this path, which must be in the run's folder.
#[pyfunction]
fn is_runs(path: &str) -> bool {
    crate::ownership::is_runs(Path::new(path))
}

/// Joins the BPE pieces of a line into whole words.
#[pyfunction]
fn join_line(line: &str) -> String {
    data::join_line(line)
}

/// Returns BLEU and its parts as JSON, computed as multi-bleu.perl does, or with sacreBLEU's tokeniser `tokenize`.
#[pyfunction]
#[pyo3(signature = (hypotheses, references, lowercase=false, tokenize=None))]
fn bleu(hypotheses: Vec<String>, references: Vec<String>, lowercase: bool, tokenize: Option<&str>) -> PyResult<String> {
    let score = match tokenize {
        None => metrics::multi_bleu(&hypotheses, &references, lowercase)?,
        Some(name) => metrics::bleu(&hypotheses, &references, metrics::Tokenize::parse(name)?)?,
    };
    json_text(&json!({
        "bleu": score.bleu, "precisions": score.precisions, "brevity_penalty": score.brevity_penalty,
        "ratio": score.ratio, "hyp_len": score.hyp_len, "ref_len": score.ref_len, "text": score.to_string(),
    }))
}

/// Asks glibc to keep freed memory for later use, as training and translation do. Does nothing if
/// NORMFORMER_RS_ALLOCATOR=system.
#[pyfunction]
fn keep_memory() {
    pages::keep_memory();
}

/// Learns `operations` BPE merges from lines of words. Returns pairs of pieces, in the order in which they are merged.
#[pyfunction]
fn learn_bpe(py: Python<'_>, lines: Vec<String>, operations: usize) -> PyResult<Vec<(String, String)>> {
    interruptible(py, "learning BPE", |check_interrupt| {
        let bpe = Bpe::learn(lines.iter().map(String::as_str), operations, check_interrupt)?;
        Ok(bpe.merges().to_vec())
    })
}

/// Adds this file's functions to the Python module.
pub(super) fn add(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(translate, m)?)?;
    m.add_function(wrap_pyfunction!(generate, m)?)?;
    m.add_function(wrap_pyfunction!(evaluate_windows, m)?)?;
    m.add_function(wrap_pyfunction!(encode, m)?)?;
    m.add_function(wrap_pyfunction!(average, m)?)?;
    m.add_function(wrap_pyfunction!(keep_memory, m)?)?;
    m.add_function(wrap_pyfunction!(evaluate_loss, m)?)?;
    m.add_function(wrap_pyfunction!(load_model, m)?)?;
    m.add_function(wrap_pyfunction!(save_model, m)?)?;
    m.add_function(wrap_pyfunction!(target_vocabulary, m)?)?;
    m.add_function(wrap_pyfunction!(write_arrays, m)?)?;
    m.add_function(wrap_pyfunction!(check_run, m)?)?;
    m.add_function(wrap_pyfunction!(run_options, m)?)?;
    m.add_function(wrap_pyfunction!(is_runs, m)?)?;
    m.add_function(wrap_pyfunction!(join_line, m)?)?;
    m.add_function(wrap_pyfunction!(learn_bpe, m)?)?;
    m.add_function(wrap_pyfunction!(bleu, m)?)
}
