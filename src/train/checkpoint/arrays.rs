//! Named arrays and their file format, safetensors. Files are read and written one array at a time.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};

use super::{damaged, CheckedFile, Dtype};
use crate::atomic::{Digest, Sink};
use crate::error::{Error, Result};
use crate::host::Held;

/// Arrays by name.
pub type Arrays = BTreeMap<String, Array>;

/// The maximum size of the header in bytes; safetensors has the same limit.
const HEADER_BYTES: u64 = 100_000_000;

/// One array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// The type of the elements, as safetensors names it.
    pub dtype: Dtype,
    /// The sizes of the dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// The elements in row-major order, little-endian.
    pub data: Bytes,
}

/// The bytes of an array: its own copy, or a tensor's memory. Saving uses the tensors' memory, because a copy of all
/// tensors might exceed the machine's free memory.
#[derive(Debug)]
pub enum Bytes {
    Own(Vec<u8>),
    /// The memory of a tensor.
    Held(Held<u8>),
}

impl Bytes {
    /// Returns the bytes for writing. If a tensor holds them, they are copied first.
    pub fn to_mut(&mut self) -> &mut [u8] {
        if let Bytes::Held(held) = self {
            *self = Bytes::Own(held.to_vec());
        }
        match self {
            Bytes::Own(own) => own,
            Bytes::Held(_) => unreachable!("they were copied above"),
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Own(own) => own,
            Bytes::Held(held) => held,
        }
    }
}

impl Clone for Bytes {
    fn clone(&self) -> Self {
        Bytes::Own(self.to_vec())
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

impl<B: Into<Vec<u8>>> From<B> for Bytes {
    fn from(bytes: B) -> Self {
        Bytes::Own(bytes.into())
    }
}

impl FromIterator<u8> for Bytes {
    fn from_iter<I: IntoIterator<Item = u8>>(bytes: I) -> Self {
        Bytes::Own(bytes.into_iter().collect())
    }
}

impl Array {
    /// Returns the number of bytes of an array with this dtype and shape; `None` if that is not a whole number or too
    /// large for a usize.
    fn bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size))?;
        let bits = elements.checked_mul(self.dtype.bitsize())?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

/// Errors if an array's data do not fill its shape, or if its name is reserved.
pub(super) fn check(arrays: &Arrays) -> Result<()> {
    for (name, array) in arrays {
        if name == "__metadata__" {
            return Err(Error::invalid("an array cannot be called \"__metadata__\": safetensors keeps that name"));
        }
        if array.bytes() != Some(array.data.len()) {
            let Array { dtype, shape, data } = array;
            let bytes = data.len();
            return Err(Error::invalid(format!("array {name:?} of {bytes} bytes is not {dtype:?} of shape {shape:?}")));
        }
    }
    Ok(())
}

/// Writes arrays that have passed [`check`]. Arrays with the widest elements come first, so that each array is
/// aligned in the file.
pub(super) fn write(sink: &mut Sink, arrays: &Arrays) -> Result<()> {
    let mut order: Vec<(&String, &Array)> = arrays.iter().collect();
    // `Dtype` is ordered by the width of elements.
    order.sort_by_key(|(_, array)| std::cmp::Reverse(array.dtype));
    // The number of bytes of the arrays so far, which is where the next array begins.
    let mut end = 0;
    // For each array, its name and its entry in the header.
    let infos = order.iter().map(|(name, array)| {
        let start = end;
        end += array.data.len();
        let info = TensorInfo { dtype: array.dtype, shape: array.shape.clone(), data_offsets: (start, end) };
        ((*name).clone(), info)
    });
    // Programs that read Hugging Face's files require this entry.
    let about = [("format".to_string(), "pt".to_string())].into();
    let mut header = Metadata::new(Some(about), infos.collect())
        .map_err(|e| e.to_string())
        .and_then(|metadata| serde_json::to_vec(&metadata).map_err(|e| e.to_string()))
        .map_err(|e| Error::invalid(format!("the arrays cannot be written as safetensors: {e}")))?;
    // Spaces behind the header align the arrays, which follow it, to 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() as u64 > HEADER_BYTES {
        return Err(Error::invalid(format!("too many arrays for safetensors: {}", arrays.len())));
    }
    sink.put(&(header.len() as u64).to_le_bytes())?;
    sink.put(&header)?;
    order.iter().try_for_each(|(_, array)| sink.put(&array.data))
}

/// Reads the file at `path`, whose length and CRC-32 must be `expected`.
pub(super) fn read(path: &Path, expected: Digest) -> Result<Arrays> {
    let mut file = CheckedFile::open(path, expected)?;
    let bad = |why: String| damaged(path, why);
    // The file has the header's length in 8 bytes, the header, and the arrays. `rest` counts the bytes behind the 8.
    let rest = expected.bytes.checked_sub(8).ok_or_else(|| bad(format!("{} bytes hold no header", expected.bytes)))?;
    let mut length = [0; 8];
    length.copy_from_slice(&file.take(8)?);
    let length = u64::from_le_bytes(length);
    if length > rest.min(HEADER_BYTES) {
        return Err(bad(format!("its header asks for {length} bytes, {rest} follow")));
    }
    let header: Metadata = serde_json::from_slice(&file.take(length)?).map_err(|e| bad(format!("its header: {e}")))?;
    if header.data_len() as u64 != rest - length {
        return Err(bad(format!("its arrays ask for {} bytes, {} follow", header.data_len(), rest - length)));
    }
    let mut arrays = Arrays::new();
    // The file has the arrays in the order of their offsets, so each `take` reads the next array.
    for name in header.offset_keys() {
        let Some(TensorInfo { dtype, shape, data_offsets: (start, end) }) = header.info(&name) else { continue };
        let data = file.take((end - start) as u64)?.into();
        arrays.insert(name, Array { dtype: *dtype, shape: shape.clone(), data });
    }
    file.finish()?;
    Ok(arrays)
}
