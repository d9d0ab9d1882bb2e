//! A run: training makes a folder from text files and three configurations. The folder has everything that
//! translation needs.
//!
//! ```text
//! DIR/config.json        the three configurations
//! DIR/vocabulary.txt     the vocabulary, in the format of fairseq's dict.txt
//! DIR/bpe.codes          the merges, in subword-nmt's format
//! DIR/target_types.txt   the entries of the target vocabulary
//! DIR/log.jsonl          the events, one JSON object per line
//! DIR/checkpoints/       the best checkpoint, the last, and the newest ones
//! DIR/checksums.txt      the checksums of the files that do not change
//! ```

mod average;
mod completion;
mod folder;
mod init_from;
mod lock;
mod needs;
mod perplexity;
mod prepare;
mod start;
mod translator;
mod workers;

pub use average::average;
pub use completion::{encode, Completion};
pub use folder::{check, options, save_model, target_vocabulary, Mode};
pub use needs::dry_run;
pub use perplexity::WindowScore;
pub use prepare::{prepare, PreparedData};
pub use start::{train, Surroundings};
pub use translator::{load_model, Translation, Translator};

use crate::error::{Error, Result};
use tch::Device;

/// Returns the device with this name: cpu; cuda:N; cuda, which is the device of this process under torchrun,
/// otherwise the first; or auto, which is cuda if available.
pub fn device(name: &str) -> Result<Device> {
    let device_count = tch::Cuda::device_count().max(0) as usize;
    // torchrun gives each process of a machine its own LOCAL_RANK, from 0.
    let local_rank = || std::env::var("LOCAL_RANK").ok().and_then(|rank| rank.parse().ok()).unwrap_or(0);
    let wanted = match name {
        "cpu" => return Ok(Device::Cpu),
        "auto" if device_count == 0 => return Ok(Device::Cpu),
        "auto" | "cuda" => local_rank(),
        other => match other.strip_prefix("cuda:").and_then(|n| n.parse().ok()) {
            Some(n) => n,
            // By edit distance "gpu" is close to "cpu", so the general suggestion would be wrong.
            None if other.to_lowercase().starts_with("gpu") => {
                return Err(Error::invalid(format!(
                    "unknown device {other:?} (did you mean \"cuda\"?); expected one of cpu, cuda, cuda:0, auto"
                )))
            }
            None => return Err(crate::error::unknown("device", other, ["cpu", "cuda", "cuda:0", "auto"])),
        },
    };
    if wanted >= device_count {
        return Err(Error::invalid(format!(
            "device {name} (number {wanted}) is not there: this machine has {device_count} CUDA devices; use cpu or auto"
        )));
    }
    Ok(Device::Cuda(wanted))
}
