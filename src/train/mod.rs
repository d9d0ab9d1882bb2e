//! The training loop: batches → model → loss → optimizer → checkpoint, with no Python inside a step.

pub mod checkpoint;

mod agreement;
mod cuda_graphs;
mod evaluate;
mod forward_backward;
mod layers;
mod loss;
mod micro_batch;
mod observer;
mod optimizer;
mod peak;
mod schedule;
mod trainer;
mod watched;

pub use checkpoint::{load_parameters, to_arrays};
pub use cuda_graphs::{Recorder, Replay, Work};
pub use evaluate::{evaluate_loss, to_text, Score, Validation, UNKNOWN_MEANT};
pub use loss::{smoothing, Objective};
pub use observer::{Evaluation, Observer, Saved, Started, Update};
pub use optimizer::rule::step as step_by_rule;
pub use optimizer::unit::dimension as unit_dimension;
pub use optimizer::QkClip;
pub use peak::peak_of_update;
pub use schedule::Schedule;
pub use trainer::{Parts, Progress, Trainer};
