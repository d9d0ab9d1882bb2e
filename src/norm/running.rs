//! A norm with running statistics, in a model.

use super::columns::Options;
use super::group_scaling::group_scaling;
use super::statistics::StateTensors;
use super::{Norm, Rows, Site};
use crate::analysis::Columns;
use crate::error::{Error, Result};
use crate::init::Fill;
use crate::model::Builder;
use crate::operator::{column_norm, Column, ColumnKernels, Group};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use tch::Tensor;

/// The statistics that each norm used in a forward pass that will be run again for its gradient.
pub type Kept = Rc<RefCell<HashMap<usize, Tensor>>>;

/// Which statistics, and how they move.
pub struct Running {
    pub kernels: &'static ColumnKernels,
    pub first: Tensor,
    pub second: Option<Tensor>,
    pub iters: Option<Tensor>,
    pub options: Options,
    /// Over all ranks, where there are several.
    pub sync: bool,
}

struct InModel {
    weight: Tensor,
    bias: Tensor,
    running: Running,
    /// Statistics that were not finite and not taken in.
    refused: Tensor,
    /// Of the group scaling that comes first; none: 0.
    groups: i64,
}

/// γ = 1, β = 0, ε = 1e-5, and what `make` declares.
pub fn build(
    b: &mut Builder,
    site: &Site,
    make: impl FnOnce(&mut Builder, &Site) -> Result<Running>,
) -> Result<Box<dyn Norm>> {
    let weight = b.parameter("weight", &[site.width], &Fill::Constant(1.0))?;
    let bias = b.parameter("bias", &[site.width], &Fill::Constant(0.0))?;
    let mut running = make(b, site)?;
    running.options.eps = site.config.norm_eps.unwrap_or(1e-5);
    let groups = if running.options.release { site.config.heads } else { site.config.groupscaling };
    if groups > 0 && site.width % groups != 0 {
        return Err(Error::invalid(format!("a norm of width {} cannot be scaled in {groups} groups", site.width)));
    }
    Ok(Box::new(InModel { weight, bias, running, refused: b.refused()?, groups }))
}

impl Norm for InModel {
    fn forward(&self, x: &Tensor, rows: &Rows) -> Result<Tensor> {
        let Running { kernels, first, second, iters, options, sync } = &self.running;
        let scaled = if self.groups > 0 { group_scaling(x, self.groups)? } else { x.shallow_clone() };
        let key = std::ptr::from_ref(self) as usize;
        let used = rows.kept.filter(|_| rows.again).and_then(|kept| kept.borrow().get(&key).map(Tensor::shallow_clone));
        // A second run with nothing kept moves copies.
        let own = |t: &Tensor| if rows.again && used.is_none() { t.copy() } else { t.shallow_clone() };
        let (y, stats) = column_norm(
            kernels,
            &Column {
                x: &scaled,
                weight: Some(&self.weight),
                bias: Some(&self.bias),
                pad_mask: rows.pad_mask,
                state: StateTensors {
                    first: Some(own(first)),
                    second: second.as_ref().map(own),
                    iters: iters.as_ref().map(own),
                    refused: Some(own(&self.refused)),
                },
                stats: used.as_ref(),
                options: Options {
                    train: rows.train,
                    group: if *sync { rows.group } else { Group::ALONE },
                    ..*options
                },
            },
        )?;
        if let (false, Some(kept)) = (rows.again, rows.kept) {
            kept.borrow_mut().insert(key, stats);
        }
        if let Some(watch) = rows.watch {
            let (mean, square) = match second {
                Some(variance) if kernels.centred => (Some(first), variance),
                _ => (None, first),
            };
            watch.norm(
                Columns {
                    x: scaled,
                    pad_mask: rows.pad_mask.map(Tensor::shallow_clone),
                    weight: Some(self.weight.shallow_clone()),
                    mean: mean.map(Tensor::shallow_clone),
                    square: square.shallow_clone(),
                    eps: options.eps,
                },
                &y,
            );
        }
        Ok(y)
    }
}
