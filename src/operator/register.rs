//! Converts an operator's declaration to the structs that C++ reads (declared.h), with indices in place of names.

use super::argument::{Argument, DtypeRule, FIXED, KEPT, LEADER, PLAIN};
use super::declare::{Kernels, Operator};
use super::ffi::{shim_error, Span};
use crate::error::{Error, Result};
use std::ffi::{c_char, c_void, CString};

/// The struct `Argument` of declared.h, which describes the fields.
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
    /// Converts an argument or output. `place` is an argument's index in the schema; for an output it is the index, in
    /// `table`, of the argument whose shape or type the output has.
    fn new(argument: &Argument, place: usize) -> Self {
        let [name, sizes] = [argument.name, &argument.sizes].map(kept);
        let (kind, reading) = (argument.dtype as u8, argument.reading as u8);
        ArgumentRow { name, sizes, place, kind, is: argument.is, reading }
    }
}

/// The source from which a backward operator gets one of its arguments.
#[repr(C)]
#[derive(Clone, Copy)]
struct Origin {
    /// One of the constants below.
    kind: i32,
    /// The index of the output or of the forward operator's argument.
    index: u32,
    /// The argument is passed only if the gradient of this entry of the forward operator's `table` is wanted; -1 means
    /// always.
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
    /// Returns a source that is always passed; `kind` and `index` are the fields.
    fn of(kind: i32, index: usize) -> Self {
        Origin { kind, index: index as u32, only_for: -1 }
    }
}

/// The struct `Op` of declared.h, which describes the fields.
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

// The flags of `Op::is`: the devices with kernels, and what else the operator has. declared.h explains each.
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
    /// The schema's arguments, in order.
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
        for argument in &operator.arguments {
            let place = declared.argument(argument.name)?;
            match declared.formals[place].is_list {
                // Arguments of these kinds are not tensors, so neither `table` nor `lists` has them.
                _ if matches!(argument.dtype, DtypeRule::Dtype | DtypeRule::Number | DtypeRule::Title) => (),
                true => declared.lists.push((argument, place)),
                false => declared.table.push((argument, place)),
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
        let leader = self.table.iter().find(|(argument, _)| argument.is & LEADER != 0);
        leader.map_or_else(|| self.wrong("has no leader"), |(argument, place)| Ok((*argument, *place)))
    }

    /// Returns an error whose text is the operator's name and `fault`.
    fn wrong<T>(&self, fault: impl std::fmt::Display) -> Result<T> {
        Err(Error::Torch(format!("{} {fault}", self.operator.name())))
    }

    /// Returns the index of an argument in the schema, if it has one.
    pub fn place(&self, name: &str) -> Option<usize> {
        self.formals.iter().position(|a| a.name == name)
    }

    /// Returns the index of an argument in the schema, or an error if the schema lacks it.
    fn argument(&self, name: &str) -> Result<usize> {
        let place = self.place(name);
        place.map_or_else(|| self.wrong(format!("has no argument {name}")), Ok)
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
        let only = self.operator.arguments.iter().find(|argument| argument.dtype == kind);
        only.map_or(Ok(-1), |argument| Ok(self.argument(argument.name)? as i64))
    }

    /// Returns the declaration in C++'s form, without the derivative.
    fn op(&self) -> Result<Op> {
        let operator = self.operator;
        let leader = self.table.iter().position(|(argument, _)| argument.is & LEADER != 0);
        let Some(leader) = leader else { return self.wrong("has no leader") };
        let row = |(argument, place): &(&Argument, usize)| ArgumentRow::new(argument, *place);
        // An output that names no argument in `like` is like the leader.
        let made = |output: &Argument| match output.like {
            "" => Ok(ArgumentRow::new(output, leader)),
            like => match self.row(like) {
                Some(place) => Ok(ArgumentRow::new(output, place)),
                None => self.wrong(format!("has an output {} that is like no argument", output.name)),
            },
        };
        let numbers = operator.arguments.iter().filter(|a| a.dtype == DtypeRule::Number);
        let numbers = numbers.map(|a| Ok(ArgumentRow::new(a, self.argument(a.name)?))).collect::<Result<Vec<_>>>()?;
        if numbers.len() > MOST_NUMBERS {
            return self.wrong(format!("has more than {MOST_NUMBERS} numbers that letters stand for"));
        }
        Ok(Op {
            rust: std::ptr::from_ref(operator).cast(),
            name: kept(operator.name()),
            schema: kept(&operator.schema),
            n_args: self.formals.len(),
            leader,
            dtype: self.only(DtypeRule::Dtype)?,
            title: self.only(DtypeRule::Title)?,
            p: self.place("p").map_or(-1, |p| p as i64), // the dropout rate
            is: flags(operator),
            table: Span::kept(self.table.iter().map(row).collect()),
            made: Span::kept(operator.outputs.iter().map(made).collect::<Result<_>>()?),
            lists: Span::kept(self.lists.iter().map(row).collect()),
            numbers: Span::kept(numbers),
            // `connected` sets the fields of a derivative, and C++ sets `handle`.
            has_gradient: Span::kept(vec![]),
            plain: Span::kept(vec![]),
            saved: Span::kept(vec![]),
            backward: std::ptr::null_mut(),
            sources: Span::kept(vec![]),
            results: Span::kept(vec![]),
            handle: std::ptr::null(),
        })
    }

    /// Returns the declaration with its derivative, the operator `backward`. The names of its arguments decide the
    /// source of each argument; the names of its outputs decide whose gradient each output is.
    fn connected(&self, backward: &Declared) -> Result<Op> {
        let (mut op, mut backward_op) = (self.op()?, backward.op()?);
        // `has_gradient` has a 1 for each output whose gradient `backward` takes. The node of autograd keeps an
        // argument without a version check if `plain` has a 1 for it, and with a check if `is_kept` is true.
        let (mut sources, mut saved) = (vec![], vec![]);
        let mut has_gradient = vec![0; self.operator.outputs.len()];
        let mut plain: Vec<u8> = self.formals.iter().map(|a| u8::from(!a.is_tensor)).collect();
        // Without a function for second derivatives the formula is differentiated, which needs all arguments.
        let mut is_kept = vec![self.operator.double_backward.is_none(); plain.len()];
        for formal in &backward.formals {
            let gradient_of = formal.name.strip_prefix('d').and_then(|name| self.output(name));
            // The argument is the gradient of output k, output k itself, or an argument of the forward operator.
            let mut source = match (gradient_of, self.output(formal.name)) {
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
                    let Ok(place) = self.argument(formal.name) else {
                        return backward
                            .wrong(format!("has an argument {} that the operator has not kept", formal.name));
                    };
                    // `backward` writes to its buffers, so the node keeps the buffer itself, without a version check.
                    match formal.is_written {
                        true => plain[place] = 1,
                        false => is_kept[place] = true,
                    }
                    Origin::of(ARGUMENT, place)
                }
            };
            // An argument that `backward` declares `like` another is passed only if that argument's gradient is wanted.
            let like = backward.row(formal.name).map(|row| backward.table[row].0.like);
            if let Some(like) = like.filter(|like| !like.is_empty()) {
                let Some(row) = self.row(like) else {
                    return backward.wrong(format!("has {} for {like}, which is none", formal.name));
                };
                source.only_for = row as i64;
            }
            sources.push(source);
        }
        for (argument, place) in &self.table {
            plain[*place] |= u8::from(argument.is & PLAIN != 0);
            if (is_kept[*place] || argument.is & KEPT != 0) && plain[*place] == 0 {
                saved.push(Origin::of(ARGUMENT, *place));
            }
        }
        // The result is the index in `table` of the argument whose gradient the output is.
        let result = |output: &Argument| match output.name.strip_prefix('d').and_then(|name| self.row(name)) {
            Some(row) => Ok(row),
            None => backward.wrong(format!("has an output {} that is no argument's gradient", output.name)),
        };
        backward_op.sources = Span::kept(sources);
        backward_op.results = Span::kept(backward.operator.outputs.iter().map(result).collect::<Result<_>>()?);
        op.has_gradient = Span::kept(has_gradient);
        op.plain = Span::kept(plain);
        op.saved = Span::kept(saved);
        op.backward = Box::into_raw(Box::new(backward_op));
        Ok(op)
    }
}

/// Returns the operator's flags as declared.h numbers them.
fn flags(operator: &Operator) -> u32 {
    let kernels = match operator.kernels {
        Kernels::Everywhere => ON_CPU | ON_GPU,
        Kernels::Cpu => ON_CPU,
        Kernels::Gpu => ON_GPU,
        Kernels::Nowhere => 0,
        Kernels::Composition => ON_GPU | COMPOSITION,
    };
    let has_formula = operator.formula.is_some();
    let more = [
        (has_formula, COMPOSED),
        (operator.has_own_gradient, RECORDED),
        (has_formula && operator.backward.is_some() && !operator.is_looped, BATCHED),
        (operator.is_looped, LOOPED),
    ];
    more.into_iter().filter(|(is_set, _)| *is_set).fold(kernels, |flags, (_, flag)| flags | flag)
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
    // C++ keeps the pointer for ever.
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

    /// Declares f(x, w, p) → (y, stats), with these requirements; the output y is like the argument `like`.
    fn forward(arguments: Vec<Argument>, like: &'static str) -> Operator {
        let outputs = [tensor("y", "*d", DtypeRule::Same).like(like), tensor("stats", "*1", DtypeRule::Computed)];
        Operator::new("f(Tensor x, Tensor? w=None, *, float p=0.5) -> (Tensor, Tensor)", arguments, outputs)
    }

    /// Declares a backward operator of f, with these names of its last argument and its second output.
    fn backward(argument: &str, result: &'static str) -> Operator {
        let schema = format!("b(Tensor dy, Tensor x, Tensor stats, float {argument}) -> (Tensor, Tensor)");
        let arguments =
            [tensor("dy", "*d", DtypeRule::Same), leader("x", "*d"), tensor("stats", "*1", DtypeRule::Computed)];
        Operator::new(schema, arguments, [gradient("dx", "x"), gradient(result, "x")])
    }

    /// Returns the error's text, or "" if there is no error.
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
        // SAFETY: `connected` leaked both.
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
