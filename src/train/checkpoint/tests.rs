//! Tests of the checkpoint's file format, of damaged files, and of averages.

use serde_json::json;

use super::testing::{checkpoint, f32s};
use super::*;
use crate::testing::Scratch;

/// Returns the message with which loading a checkpoint fails.
fn refused(path: &Path) -> String {
    load(path).expect_err("a refusal").to_string()
}

#[test]
fn every_dtype_and_shape_comes_back() {
    use Dtype::*;
    let dir = Scratch::new("ckpt-dtypes");
    let mut saved = Checkpoint { state: json!({"t": u64::MAX}), config: json!([1, "ü"]), ..Default::default() };
    let dtypes = [BOOL, F4, F6_E2M3, F6_E3M2, U8, I8, F8_E5M2, F8_E4M3, F8_E8M0, I16, U16, F16, BF16, I32, U32, F32];
    for dtype in dtypes.into_iter().chain([F64, I64, U64]) {
        let shapes: [&[usize]; 4] = [&[], &[0, 3], &[8], &[2, 3, 4]];
        for shape in shapes.into_iter().filter(|s| !s.is_empty() || dtype.bitsize() >= 8) {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let data = (0..bytes).map(|i| (i * 37 + dtype.bitsize()) as u8).collect();
            saved.model.insert(format!("{dtype:?} \"{shape:?}\""), Array { dtype, shape: shape.into(), data });
        }
    }
    save(&dir.0.join("c"), 7, &saved).unwrap();
    assert_eq!(load(dir.0.join("c")).unwrap(), saved);
    assert_eq!(load_model(dir.0.join("c")).unwrap(), (saved.model.clone(), saved.config.clone()));
    // The safetensors crate must read the files in the same way.
    let bytes = fs::read(dir.0.join("c").join(MODEL)).unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(read.len(), saved.model.len());
    for (name, view) in read.iter() {
        let Array { dtype, shape, data } = &saved.model[name];
        assert_eq!((view.dtype(), view.shape(), view.data()), (*dtype, &shape[..], &data[..]), "{name}");
        let offset = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(offset % (dtype.bitsize() / 8).max(1), 0, "{name} is not aligned");
    }
    let bytes = fs::read(dir.0.join("c").join(OPTIMIZER)).unwrap();
    assert!(safetensors::SafeTensors::deserialize(&bytes).unwrap().is_empty());
}

/// Without its feature `float_roundtrip`, serde_json reads floats inexactly, and a resumed run would differ.
#[test]
fn floats_of_the_state_come_back_to_the_bit() {
    let dir = Scratch::new("ckpt-floats");
    let mut bits = 1u64;
    let random = std::iter::repeat_with(|| {
        bits = bits.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        f64::from_bits(bits)
    });
    let floats: Vec<f64> = random.filter(|x| x.is_finite()).take(2000).collect();
    let saved = Checkpoint { state: json!(floats), ..Default::default() };
    save(&dir.0.join("c"), 1, &saved).unwrap();
    let read: Vec<f64> = serde_json::from_value(load(dir.0.join("c")).unwrap().state).unwrap();
    assert!(read.iter().zip(&floats).all(|(a, b)| a.to_bits() == b.to_bits()));
}

#[test]
fn an_array_that_does_not_fill_its_shape_is_not_written() {
    let dir = Scratch::new("ckpt-shape");
    for shape in [vec![2, 2], vec![usize::MAX, 3]] {
        let mut bad = checkpoint(1);
        bad.optimizer.insert("w".into(), Array { shape, ..f32s(&[3], [0.0; 3]) });
        let error = save(&dir.0.join("c"), 1, &bad).unwrap_err().to_string();
        assert!(error.contains("array \"w\" of 12 bytes is not F32"), "{error}");
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 0);
    }
}

#[test]
fn a_tensor_is_saved_from_where_it_lies() {
    let t = tch::Tensor::from_slice(&[1.0f32, 2.0, 3.0]);
    let mut array = to_array(&t).unwrap();
    assert_eq!(array.data.as_ptr().cast_mut().cast(), t.data_ptr());
    let copy = array.clone();
    assert_eq!(copy, array);
    array.data.to_mut()[0] = 9;
    assert_ne!(copy, array);
    assert_eq!(Vec::<f32>::try_from(&t).unwrap(), [1.0, 2.0, 3.0]);
}

#[test]
fn a_truncated_or_lengthened_file_is_named_with_both_lengths() {
    let dir = Scratch::new("ckpt-truncated");
    let path = dir.0.join("c");
    save(&path, 1, &checkpoint(1)).unwrap();
    for name in [MODEL, OPTIMIZER, CONFIG, STATE] {
        let file = path.join(name);
        let whole = fs::read(&file).unwrap();
        let n = whole.len();
        for length in [0, 1, 7, 8, 9, n / 2, n - 1, n + 1] {
            let mut part = whole.clone();
            part.resize(length, b' ');
            fs::write(&file, part).unwrap();
            let error = refused(&path);
            let lengths = name == STATE || error.contains(&format!("expected {n} bytes, found {length};"));
            assert!(error.contains(name) && error.contains("is damaged") && lengths, "{name} {length}: {error}");
        }
        fs::remove_file(&file).unwrap();
        let error = refused(&path);
        assert!(error.contains(name) && (error.contains("holds") || error.contains("found")), "{error}");
        fs::write(&file, whole).unwrap();
    }
    fs::remove_file(path.join(OPTIMIZER)).unwrap();
    assert_eq!(load_model(&path).unwrap().0, checkpoint(1).model);
}

#[test]
fn a_flipped_bit_anywhere_is_refused() {
    let dir = Scratch::new("ckpt-flipped");
    let path = dir.0.join("c");
    save(&path, 1, &checkpoint(1)).unwrap();
    for name in [MODEL, OPTIMIZER, CONFIG, STATE] {
        let whole = fs::read(path.join(name)).unwrap();
        for i in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[i] ^= 1 << (i % 8);
            fs::write(path.join(name), flipped).unwrap();
            let error = refused(&path);
            assert!(error.contains(&*path.to_string_lossy()), "{name}, byte {i}: {error}");
        }
        fs::write(path.join(name), whole).unwrap();
    }
    assert_eq!(load(&path).unwrap(), checkpoint(1));
}

/// The CRC-32 is right, but the header asks for more bytes than the file has. This must be an error before memory is
/// allocated.
#[test]
fn a_header_that_asks_for_too_much_is_refused() {
    let dir = Scratch::new("ckpt-header");
    let huge = r#"{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}"#;
    let overflow = r#"{"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    let holes = r#"{"w":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#;
    let with = |length: u64, header: &str| [&length.to_le_bytes()[..], header.as_bytes()].concat();
    let fits = |header: &str| with(header.len() as u64, header);
    for bytes in [fits(huge), fits(overflow), fits(holes), with(u64::MAX, "{}"), with(99, "{}"), fits("[]")] {
        let file = dir.0.join("f");
        fs::write(&file, &bytes).unwrap();
        let mut crc = Crc::new();
        crc.update(&bytes);
        let error = arrays::read(&file, Digest { bytes: bytes.len() as u64, crc32: crc.sum() }).unwrap_err();
        assert!(error.to_string().contains("is damaged: its "), "{error}");
    }
}

#[test]
fn a_later_format_and_strangers_are_refused_with_the_reason() {
    let dir = Scratch::new("ckpt-later");
    let path = dir.0.join("c");
    save(&path, 1, &checkpoint(1)).unwrap();
    let text = fs::read_to_string(path.join(STATE)).unwrap();
    let later = text.replace("\"format_version\": 1", "\"format_version\": 2").replace(WRITER, "normformer_rs 9.8");
    fs::write(path.join(STATE), later).unwrap();
    let error = refused(&path);
    assert!(error.contains("format 2, written by normformer_rs 9.8") && error.contains("upgrade"), "{error}");
    fs::write(path.join(STATE), "{\"epoch\": 3}").unwrap();
    assert!(refused(&path).contains("no normformer_rs checkpoint: its kind is null"));
    assert!(refused(&path.join(STATE)).contains("is a file; expected a checkpoint's folder"));
    let error = refused(&dir.0);
    assert!(error.contains("not a checkpoint: expected state.json in it, found c"), "{error}");
    let error = refused(&path.join("d"));
    assert!(error.contains("holds config.json, model.safetensors, optimizer.safetensors, state.json"), "{error}");
}

#[test]
fn the_mean_is_taken_in_f64_and_the_rest_is_the_newest() {
    let dir = Scratch::new("ckpt-average");
    let values = [[1e8, 0.1, -3.0], [1.0, 0.2, 5.0], [-1e8, 0.7, 0.5]];
    let mut paths = Vec::new();
    for (i, x) in values.into_iter().enumerate() {
        let mut part = checkpoint(i as u64);
        part.model = [
            ("f32".into(), f32s(&[3], x)),
            (
                "f64".into(),
                Array { dtype: Dtype::F64, shape: vec![3], data: bytes(x, |x| f64::from(x).to_le_bytes()).into() },
            ),
            (
                "bf16".into(),
                Array {
                    dtype: Dtype::BF16,
                    shape: vec![3],
                    data: bytes(x, |x| half::bf16::from_f32(x).to_le_bytes()).into(),
                },
            ),
            (
                "f16".into(),
                Array {
                    dtype: Dtype::F16,
                    shape: vec![3],
                    data: bytes(x, |x| half::f16::from_f32(x % 9e4).to_le_bytes()).into(),
                },
            ),
            ("iters".into(), Array { dtype: Dtype::I64, shape: vec![1], data: (i as i64).to_le_bytes().into() }),
        ]
        .into();
        paths.push(dir.0.join(i.to_string()));
        save(&paths[i], i as u64, &part).unwrap();
    }
    let mean = average(&paths, &mut || Ok(())).unwrap();
    // In f32, 1e8 + 1 − 1e8 would be 0.
    let third = |x: f64| x / 3.0;
    let middle = f64::from(0.1f32) + f64::from(0.2f32) + f64::from(0.7f32);
    let exact = [third(1.0), third(middle), third(2.5)];
    assert_eq!(mean.model["f32"], f32s(&[3], exact.map(|x| x as f32)));
    let got: Vec<f64> = mean.model["f64"].data.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect();
    assert!(got.iter().zip(exact).all(|(a, b)| (a - b).abs() < 1e-15), "{got:?}");
    assert_eq!(mean.model["bf16"].data[4..], half::bf16::from_f64(exact[2]).to_le_bytes());
    assert_eq!(mean.model["f16"].data[4..], half::f16::from_f64(exact[2]).to_le_bytes());
    assert_eq!(mean.model["iters"].data[..], 2i64.to_le_bytes());
    assert_eq!((&mean.state, &mean.optimizer), (&checkpoint(2).state, &Arrays::new()));
    paths.rotate_left(1);
    assert_eq!(average(&paths, &mut || Ok(())).unwrap(), mean, "the order of the paths");
    save(&dir.0.join("mean"), 2, &mean).unwrap();
    assert_eq!(load(dir.0.join("mean")).unwrap(), mean);
    assert_eq!(average(&paths[..1], &mut || Ok(())).unwrap().model, load(&paths[0]).unwrap().model, "of one");
}

/// Returns the bytes of three numbers; `to` converts one number.
fn bytes<const N: usize>(x: [f32; 3], to: impl Fn(f32) -> [u8; N]) -> Vec<u8> {
    x.into_iter().flat_map(to).collect()
}

#[test]
fn models_that_differ_are_not_averaged() {
    let dir = Scratch::new("ckpt-differ");
    let first = dir.0.join("first");
    save(&first, 1, &checkpoint(1)).unwrap();
    let refusal = |name: &str, change: &dyn Fn(&mut Checkpoint)| {
        let mut other = checkpoint(2);
        change(&mut other);
        save(&dir.0.join(name), 2, &other).unwrap();
        average(&[&first, &dir.0.join(name)], &mut || Ok(())).unwrap_err().to_string()
    };
    let config = refusal("config", &|c| c.config["model"]["norm"]["name"] = "layernorm".into());
    assert!(
        config.contains("cannot be averaged: norm was {") && config.contains("now {\"name\":\"layernorm\"}"),
        "{config}"
    );
    let more = refusal("more", &|c| drop(c.model.insert("b".into(), f32s(&[1], [0.0]))));
    assert!(more.contains("only the first has array \"b\""), "{more}");
    let fewer = refusal("fewer", &|c| drop(c.model.remove("iters")));
    assert!(fewer.contains("only the second has array \"iters\""), "{fewer}");
    let shape = refusal("shape", &|c| c.model.get_mut("encoder.weight").unwrap().shape = vec![150]);
    assert!(shape.contains("\"encoder.weight\" is F32 [150] in the first, F32 [3, 50] in the second"), "{shape}");
    let eight = |c: &mut Checkpoint| {
        drop(c.model.insert("q".into(), Array { dtype: Dtype::F8_E4M3, shape: vec![1], data: vec![0].into() }))
    };
    refusal("eight", &eight);
    assert!(average(&[dir.0.join("eight")], &mut || Ok(())).unwrap_err().to_string().contains("\"q\" is F8_E4M3"));
    assert!(average(&[&first, &first], &mut || Ok(())).unwrap_err().to_string().contains("twice"));
    assert!(average(&[] as &[PathBuf], &mut || Ok(())).unwrap_err().to_string().contains("at least one"));
}
