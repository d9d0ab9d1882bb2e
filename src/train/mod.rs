//! The training loop: batches → model → loss → optimizer → checkpoint, with no Python inside a step.

pub mod checkpoint;
pub mod fault;
pub mod files;

mod evaluate;
mod graphs;
mod input;
mod loss;
mod observer;
mod optimizer;
mod pass;
mod schedule;
mod snapshot;
mod trainer;

pub use evaluate::{evaluate_loss, to_text, Score, Validation};
pub use graphs::{Recorder, Replay, Work};
pub use input::Input;
pub use loss::{smoothing, Objective};
pub use observer::{Evaluation, Observer, Saved, Started, Update};
pub use optimizer::Optimizer;
pub use schedule::Schedule;
pub use snapshot::{load_parameters, to_arrays};
pub use trainer::{Parts, Progress, Trainer};
