//! The data pipeline, from text files to packed batches of token ids. The modules below are in its order.
//!
//! Lines of text ([`text`]) are split into pieces ([`segmenter`], [`bpe`]), and pieces become ids ([`vocabulary`]).
//! fairseq's binarised folders already contain ids ([`binarised`]). Sentences of ids form a [`corpus`], and sentences
//! of similar length share a batch ([`batches`]). Batches come in an endless stream, in an order that depends on a seed
//! ([`stream`]).

pub mod interrupt;
pub mod text;

pub mod bpe;
mod bpe_learn;
mod joiner;
pub mod segmenter;

pub mod vocabulary;

pub mod binarised;

pub mod corpus;

pub mod batches;
pub mod random;
pub mod stream;
mod windows;

pub use batches::{collate, plan, Batch, PackedIds};
pub use binarised::{Binarised, Side};
pub use bpe::Bpe;
pub use corpus::{digest, retain, Corpus, Digests, Limit, LongSentences};
pub use interrupt::{interruptible, throttled, Interrupt};
pub use joiner::Joiner;
pub use segmenter::{join, join_line, Segmenter};
pub use stream::{BatchStream, Cursor, Prefetch, StreamConfig};
pub use text::{lines_of, read_lines, read_parallel};
pub use vocabulary::{seen_mask, Vocabulary};
pub use windows::{windows, Window};
