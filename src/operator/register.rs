//! Converts an operator's declaration to the structs that C++ reads (declared.h), with indices in place of names.

use super::argument::{Argument, DtypeRule, FIXED, KEPT, LEADER, PLAIN};
use super::declare::{Kernels, Operator};
use super::ffi::{shim_error, Span};
use crate::error::{Error, Result};
use std::ffi::{c_char, c_void, CString};

#[repr(C)]
struct ArgumentRow {
    name: *const c_char,
    sizes: *const c_char,
    place: usize,
    kind: u8,
    is: u8,
    reading: u8,
}

impl ArgumentRow {
    fn new(a: &Argument, place: usize) -> Self {
        let [name, sizes] = [a.name, &a.sizes].map(kept);
        ArgumentRow { name, sizes, place, kind: a.dtype as u8, is: a.is, reading: a.reading as u8 }
    }
}

/// The source from which a backward operator gets one of its arguments.
#[repr(C)]
#[derive(Clone, Copy)]
struct Origin {
    kind: i32,
    index: u32,
    only_for: i64,
}

/// The maximum number of integer arguments with letters; arguments.h has room for as many.
const MOST_NUMBERS: usize = 2;

// The kinds of [`Origin`].
const NOTHING: i32 = 0;
const GRADIENT: i32 = 1;
const ARGUMENT: i32 = 2;
const OUTPUT: i32 = 3;

impl Origin {
    fn of(kind: i32, index: usize) -> Self {
        Origin { kind, index: index as u32, only_for: -1 }
    }
}

#[repr(C)]
struct Op {
    rust: *const c_void,
    name: *const c_char,
    schema: *const c_char,
    n_args: usize,
    leader: usize,
    dtype: i64,
    title: i64,
    p: i64,
    is: u32,
    table: Span<ArgumentRow>,
    made: Span<ArgumentRow>,
    lists: Span<ArgumentRow>,
    numbers: Span<ArgumentRow>,
    has_gradient: Span<u8>,
    plain: Span<u8>,
    saved: Span<Origin>,
    backward: *mut Op,
    sources: Span<Origin>,
    results: Span<usize>,
    handle: *const c_void,
}

// The flags of an operator in declared.h.
const ON_CPU: u32 = 1;
const ON_GPU: u32 = 2;
const COMPOSED: u32 = 4;
const COMPOSITION: u32 = 8;
const RECORDED: u32 = 16;
const BATCHED: u32 = 32;
const LOOPED: u32 = 64;

extern "C" {
    fn nfrs_define(op: *mut Op) -> bool;
}

/// Leaks a text, because C++ may keep it for ever.
fn kept(text: &str) -> *const c_char {
    CString::new(text).expect("declarations have no NUL").into_raw()
}

/// An argument of a schema.
pub(super) struct Formal<'a> {
    pub name: &'a str,
    /// The default of a float argument; `None` if it has none, or if the argument is not a float.
    pub default: Option<f64>,
    is_tensor: bool,
    is_list: bool,
    is_written: bool,
}

/// A declaration with its parsed schema.
pub(super) struct Declared<'a> {
    operator: &'a Operator,
    pub formals: Vec<Formal<'a>>,
    /// The tensor arguments, with their indices in the schema; `lists` has those that are lists of tensors.
    pub table: Vec<(&'a Argument, usize)>,
    lists: Vec<(&'a Argument, usize)>,
}

impl<'a> Declared<'a> {
    /// Parses the operator's schema, `name(KIND NAME, …) -> (KIND, …)`. Errors unless the declaration describes every
    /// tensor argument and every output of the schema.
    pub fn new(operator: &'a Operator) -> Result<Self> {
        let (arguments, returns) = operator.schema.split_once(") -> ").unwrap_or_default();
        let arguments = arguments.split_once('(').unwrap_or_default().1;
        // An argument is written `KIND NAME` or `KIND NAME=DEFAULT`, such as "Tensor(a!)? x=None"; `!` means that the
        // operator writes to it.
        let formal = |text: &'a str| {
            let (formal, default) = text.split_once('=').unwrap_or((text, ""));
            let (kind, name) = formal.rsplit_once(' ').unwrap_or_default();
            let (has_tensors, is_list) = (kind.starts_with("Tensor"), kind.ends_with("[]"));
            Formal {
                name,
                default: default.parse().ok().filter(|_| kind == "float"),
                is_tensor: has_tensors && !is_list,
                is_list: has_tensors && is_list,
                is_written: kind.contains('!'),
            }
        };
        // "*" separates keyword-only arguments; the text "" means that there are no arguments.
        let formals = arguments.split(", ").filter(|a| !["", "*"].contains(a)).map(formal).collect();
        let mut declared = Declared { operator, formals, table: vec![], lists: vec![] };
        for a in &operator.arguments {
            let place = declared.argument(a.name)?;
            match declared.formals[place].is_list {
                // These are no tensors, so neither table has them.
                _ if matches!(a.dtype, DtypeRule::Dtype | DtypeRule::Number | DtypeRule::Title) => (),
                true => declared.lists.push((a, place)),
                false => declared.table.push((a, place)),
            }
        }
        if let Some(a) = declared.formals.iter().find(|a| a.is_tensor && declared.row(a.name).is_none()) {
            return declared.wrong(format!("does not say what {} must be", a.name));
        }
        let count = returns.split(", ").filter(|r| *r != "()").count();
        match count == operator.outputs.len() {
            true => Ok(declared),
            false => declared.wrong(format!("has {count} outputs and describes {}", operator.outputs.len())),
        }
    }

    /// Returns the leader, with which types and devices are compared, and its index in the schema.
    pub fn leader(&self) -> Result<(&'a Argument, usize)> {
        let found = self.table.iter().find(|(argument, _)| argument.is & LEADER != 0);
        found.map_or_else(|| self.wrong("has no leader"), |(argument, place)| Ok((*argument, *place)))
    }

    fn wrong<T>(&self, what: impl std::fmt::Display) -> Result<T> {
        Err(Error::Torch(format!("{} {what}", self.operator.name())))
    }

    /// Returns the index of an argument in the schema, if it has one.
    pub fn place(&self, name: &str) -> Option<usize> {
        self.formals.iter().position(|a| a.name == name)
    }

    fn argument(&self, name: &str) -> Result<usize> {
        let found = self.place(name);
        found.map_or_else(|| self.wrong(format!("has no argument {name}")), Ok)
    }

    /// Returns the index in `table` of a tensor argument.
    fn row(&self, name: &str) -> Option<usize> {
        self.table.iter().position(|(a, _)| a.name == name)
    }

    /// Returns the index of an output.
    pub fn output(&self, name: &str) -> Option<usize> {
        self.operator.outputs.iter().position(|a| a.name == name)
    }

    /// Returns the index in the schema of the only argument of this kind, or -1 if there is none.
    fn only(&self, kind: DtypeRule) -> Result<i64> {
        let found = self.operator.arguments.iter().find(|a| a.dtype == kind);
        found.map_or(Ok(-1), |a| Ok(self.argument(a.name)? as i64))
    }

    /// Returns the declaration in C++'s form, without the derivative.
    fn op(&self) -> Result<Op> {
        let o = self.operator;
        let leader = self.table.iter().position(|(a, _)| a.is & LEADER != 0);
        let Some(leader) = leader else { return self.wrong("has no leader") };
        let row = |(a, place): &(&Argument, usize)| ArgumentRow::new(a, *place);
        let made = |a: &Argument| match a.like {
            "" => Ok(ArgumentRow::new(a, leader)),
            like => match self.row(like) {
                Some(place) => Ok(ArgumentRow::new(a, place)),
                None => self.wrong(format!("has an output {} that is like no argument", a.name)),
            },
        };
        let numbers = o.arguments.iter().filter(|a| a.dtype == DtypeRule::Number);
        let numbers = numbers.map(|a| Ok(ArgumentRow::new(a, self.argument(a.name)?))).collect::<Result<Vec<_>>>()?;
        if numbers.len() > MOST_NUMBERS {
            return self.wrong(format!("has more than {MOST_NUMBERS} numbers that letters stand for"));
        }
        Ok(Op {
            rust: std::ptr::from_ref(o).cast(),
            name: kept(o.name()),
            schema: kept(&o.schema),
            n_args: self.formals.len(),
            leader,
            dtype: self.only(DtypeRule::Dtype)?,
            title: self.only(DtypeRule::Title)?,
            p: self.place("p").map_or(-1, |p| p as i64),
            is: flags(o),
            table: Span::kept(self.table.iter().map(row).collect()),
            made: Span::kept(o.outputs.iter().map(made).collect::<Result<_>>()?),
            lists: Span::kept(self.lists.iter().map(row).collect()),
            numbers: Span::kept(numbers),
            has_gradient: Span::kept(vec![]),
            plain: Span::kept(vec![]),
            saved: Span::kept(vec![]),
            backward: std::ptr::null_mut(),
            sources: Span::kept(vec![]),
            results: Span::kept(vec![]),
            handle: std::ptr::null(),
        })
    }

    /// Returns the declaration with its derivative, the operator `b`. Argument names decide the source of each argument
    /// of `b`; output names decide whose gradient each output of `b` is.
    fn connected(&self, b: &Declared) -> Result<Op> {
        let (mut op, mut back) = (self.op()?, b.op()?);
        // The flags `has_gradient` are per output, `plain` and `is_kept` per argument; declared.h explains them (`Op`).
        let (mut sources, mut saved) = (vec![], vec![]);
        let mut has_gradient = vec![0; self.operator.outputs.len()];
        let mut plain: Vec<u8> = self.formals.iter().map(|a| u8::from(!a.is_tensor)).collect();
        // If the formula is differentiated for second derivatives, the node must keep all arguments.
        let mut is_kept = vec![self.operator.double_backward.is_none(); plain.len()];
        for a in &b.formals {
            let gradient = a.name.strip_prefix('d').and_then(|name| self.output(name));
            // The argument is the gradient of output k, output k itself, or an argument of the forward operator.
            let mut source = match (gradient, self.output(a.name)) {
                (Some(k), _) if self.operator.outputs[k].is & FIXED != 0 => Origin::of(NOTHING, 0),
                (Some(k), _) => {
                    has_gradient[k] = 1;
                    Origin::of(GRADIENT, k)
                }
                (None, Some(k)) => {
                    saved.push(Origin::of(OUTPUT, k));
                    Origin::of(OUTPUT, k)
                }
                (None, None) => {
                    let Ok(place) = self.argument(a.name) else {
                        return b.wrong(format!("has an argument {} that the operator has not kept", a.name));
                    };
                    // `b` writes to its buffers, so the node keeps the buffer itself, without a version check.
                    match a.is_written {
                        true => plain[place] = 1,
                        false => is_kept[place] = true,
                    }
                    Origin::of(ARGUMENT, place)
                }
            };
            // An argument that `b` declares `like` another is passed only if that argument's gradient is wanted.
            if let Some(only) = b.row(a.name).map(|i| b.table[i].0.like).filter(|like| !like.is_empty()) {
                let Some(row) = self.row(only) else {
                    return b.wrong(format!("has {} for {only}, which is none", a.name));
                };
                source.only_for = row as i64;
            }
            sources.push(source);
        }
        for (a, place) in &self.table {
            plain[*place] |= u8::from(a.is & PLAIN != 0);
            if (is_kept[*place] || a.is & KEPT != 0) && plain[*place] == 0 {
                saved.push(Origin::of(ARGUMENT, *place));
            }
        }
        let result = |a: &Argument| match a.name.strip_prefix('d').and_then(|name| self.row(name)) {
            Some(row) => Ok(row),
            None => b.wrong(format!("has an output {} that is no argument's gradient", a.name)),
        };
        back.sources = Span::kept(sources);
        back.results = Span::kept(b.operator.outputs.iter().map(result).collect::<Result<_>>()?);
        op.has_gradient = Span::kept(has_gradient);
        op.plain = Span::kept(plain);
        op.saved = Span::kept(saved);
        op.backward = Box::into_raw(Box::new(back));
        Ok(op)
    }
}

/// Returns the operator's flags as declared.h numbers them.
fn flags(o: &Operator) -> u32 {
    let kernels = match o.kernels {
        Kernels::Everywhere => ON_CPU | ON_GPU,
        Kernels::Cpu => ON_CPU,
        Kernels::Gpu => ON_GPU,
        Kernels::Nowhere => 0,
        Kernels::Composition => ON_GPU | COMPOSITION,
    };
    let has_formula = o.formula.is_some();
    let more = [
        (has_formula, COMPOSED),
        (o.has_own_gradient, RECORDED),
        (has_formula && o.backward.is_some() && !o.is_looped, BATCHED),
        (o.is_looped, LOOPED),
    ];
    more.into_iter().filter(|(is, _)| *is).fold(kernels, |flags, (_, flag)| flags | flag)
}

/// Registers an operator, and its backward operator, with PyTorch's dispatcher.
pub fn register(operator: &'static Operator) -> Result<()> {
    let declared = Declared::new(operator)?;
    let op = match &operator.backward {
        Some(backward) => {
            let _ = backward.forward.set(operator);
            declared.connected(&Declared::new(backward)?)?
        }
        None => declared.op()?,
    };
    // SAFETY: the struct is leaked, and so are the operator and everything to which the struct points.
    match unsafe { nfrs_define(Box::into_raw(Box::new(op))) } {
        true => Ok(()),
        false => Err(shim_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::declare::{gradient, leader, parameter, tensor};

    fn forward(arguments: Vec<Argument>, like: &'static str) -> Operator {
        let outputs = [tensor("y", "*d", DtypeRule::Same).like(like), tensor("stats", "*1", DtypeRule::Computed)];
        Operator::new("f(Tensor x, Tensor? w=None, *, float p=0.5) -> (Tensor, Tensor)", arguments, outputs)
    }

    fn backward(argument: &str, result: &'static str) -> Operator {
        let schema = format!("b(Tensor dy, Tensor x, Tensor stats, float {argument}) -> (Tensor, Tensor)");
        let arguments =
            [tensor("dy", "*d", DtypeRule::Same), leader("x", "*d"), tensor("stats", "*1", DtypeRule::Computed)];
        Operator::new(schema, arguments, [gradient("dx", "x"), gradient(result, "x")])
    }

    fn message<T>(result: Result<T>) -> String {
        result.err().map_or(String::new(), |e| e.to_string())
    }

    #[test]
    fn names_become_places() {
        let (f, b) = (forward(vec![leader("x", "*d"), parameter("w")], ""), backward("p", "dw"));
        let op = Declared::new(&f).unwrap().connected(&Declared::new(&b).unwrap()).unwrap();
        assert_eq!((op.n_args, op.p, op.dtype), (3, 2, -1));
        // SAFETY: `connected` leaked both.
        let (back, saved) = unsafe { (&*op.backward, op.saved.get()) };
        // SAFETY: see above.
        let (sources, results) = unsafe { (back.sources.get(), back.results.get()) };
        let places = |all: &[Origin]| all.iter().map(|s| (s.kind, s.index)).collect::<Vec<_>>();
        assert_eq!(places(sources), [(GRADIENT, 0), (ARGUMENT, 0), (OUTPUT, 1), (ARGUMENT, 2)]);
        assert_eq!(places(saved), [(OUTPUT, 1), (ARGUMENT, 0), (ARGUMENT, 1)]);
        assert_eq!(results, [0, 1]);
    }

    #[test]
    fn names_that_mean_nothing_are_refused() {
        let whole = || vec![leader("x", "*d"), parameter("w")];
        assert_eq!(message(Declared::new(&forward(vec![leader("v", "*d")], ""))), "f has no argument v");
        assert_eq!(message(Declared::new(&forward(vec![leader("x", "*d")], ""))), "f does not say what w must be");
        let like = forward(whole(), "v");
        assert_eq!(message(Declared::new(&like).unwrap().op()), "f has an output y that is like no argument");
        let f = forward(whole(), "");
        let connected = |b: Operator| message(Declared::new(&f).unwrap().connected(&Declared::new(&b).unwrap()));
        assert_eq!(connected(backward("q", "dw")), "b has an argument q that the operator has not kept");
        assert_eq!(connected(backward("p", "dv")), "b has an output dv that is no argument's gradient");
    }
}
