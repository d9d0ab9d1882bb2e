"""Faults to plant, one or more for each row of docs/reliability.md that Python code keeps.

`test_planted.py` puts each into a copy of the package, and asks the tests that the row names whether they notice.
"""

from typing import NamedTuple


class Planted(NamedTuple):
    row: str
    """How the row's promise begins."""
    file: str
    """Below python/normformer_rs."""
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]
    """The narrowest tests that notice, below `tests`, in files that the row names."""


PLANTED = [
    # Formulas
    Planted(
        "Every norm and scheme computes",
        "nn/norms.py",
        "OPS.lp_norm(x, weight, self.p, ",
        "OPS.lp_norm(x, weight, self.p + 1, ",
        ("norms/test_norm_modules.py::test_row_modules_are_the_oracle[lpnorm]",),
    ),
    Planted(
        "Every norm and scheme computes",
        "declarations/norm.py",
        "**norm.given)\n",
        "**norm.given) * 1.001\n",
        ("train/test_own_norms.py::test_logits_and_gradients_are_scalenorms[prenorm]",),
    ),
    # Operators
    Planted(
        "One dropout mask serves",
        "nn/dropout.py",
        "cols, p, site)",
        "cols, p, site + 1)",
        ("nn/test_randomness.py::test_grad_jvp_and_functional_call[prenorm]",),
    ),
    # A run's folder
    Planted(
        "Only what a run has provably written",
        "loop/training.py",
        "if os.path.lexists(picture) and not ",
        "if False and not ",
        ("train/test_ownership.py::test_a_picture_that_no_run_has_drawn_stays",),
    ),
    Planted(
        "Nothing is opened through a link",
        "loop/training.py",
        "(events.is_symlink() or not events.is_dir())",
        "not events.is_dir()",
        ("train/test_ownership.py::test_nothing_is_opened_through_a_link",),
    ),
    Planted(
        "A hostile folder or pickle",
        "formats/convert.py",
        "weights_only=not trust",
        "weights_only=False",
        ("cli/test_cli.py::test_a_file_that_would_execute_something_is_refused",),
    ),
    Planted(
        "Old runs load",
        "config.py",
        "return cls(**options)",
        "return cls(**{field.name: options[field.name] for field in cls.FIELDS})",
        ("model/test_architecture.py::test_configurations_from_before_the_options",),
    ),
    Planted(
        "A stored figure of `reproduce`",
        "reproduce/results.py",
        "keeping.keep_only(self.kept, self._digests())",
        "keeping.keep_only(self.kept, set())",
        ("train/test_kept.py::test_a_kill_leaves_figures_with_all_that_they_were_made_of",),
    ),
    Planted(
        "A stored figure of `reproduce`",
        "reproduce/kept.py",
        "if hashlib.sha256(written).hexdigest() != wanted:",
        "if False:",
        ("train/test_kept.py::test_a_change_is_noticed[a translation]",),
    ),
    # Processes and signals
    Planted(
        "Ctrl-C, SIGTERM and SIGHUP save first",
        "loop/signals.py",
        ", signal.SIGHUP)",
        ")",
        ("train/test_signals.py::test_slurm_kubernetes_and_a_closed_terminal_are_ctrl_c[1]",),
    ),
    Planted(
        "What a callback raises leaves",
        "loop/training.py",
        "            callback(name, event)\n",
        "            try:\n                callback(name, event)\n            except ValueError as error:\n"
        "                raise ValueError(*error.args) from error\n",
        (
            "train/test_signals.py::test_what_a_callback_raises_leaves_fit_as_it_is_after_saving[ValueError('mine')-updated]",
        ),
    ),
    # The command line
    Planted(
        "A mistake is one or two lines",
        "commands/options.py",
        "f'unknown option \"{name}\"{closest(name, long)}'",
        "f'unknown option \"{name}\"'",
        ("cli/test_first_contact.py::test_a_wrong_command_line_is_two_lines",),
    ),
    Planted(
        "A mistake is one or two lines",
        "text.py",
        "import codecs\n",
        "import codecs\nimport torch\n",
        ("cli/test_first_contact.py::test_help_and_mistakes_need_no_torch",),
    ),
    Planted(
        "What cannot end well is said",
        "loop/advice.py",
        "last < warmup",
        "last < warmup // 2",
        ("cli/test_beforehand.py::test_a_warm_up_that_never_ends_is_said",),
    ),
    Planted(
        "What cannot end well is said",
        "text.py",
        "if not _is_open(sys.stdout, os.O_RDONLY):",
        "if sys.stdout is None:",
        ("cli/test_streams.py::test_a_closed_output_is_said_before_the_work",),
    ),
    Planted(
        "Texts are read alike everywhere",
        "text.py",
        "return data.removeprefix(codecs.BOM_UTF8)",
        "return data",
        ("cli/test_text.py::test_a_byte_order_mark_is_no_text",),
    ),
    Planted(
        "Texts are read alike everywhere",
        "text.py",
        r"\u202a-\u202e",
        "",
        ("cli/test_text.py::test_control_characters_are_escaped",),
    ),
    Planted(
        "Every command that a message names",
        "_optional.py",
        """return f'pip install "{REQUIREMENTS[package]}"'""",
        'return f"pip install normformer_rs[{package}]"',
        ("project/test_packaging.py::test_a_missing_package_says_the_command",),
    ),
    # Models of others
    Planted(
        "A swap is right or refused",
        "surgery/proof.py",
        "if not distance <= error * max(scale, least):",
        "if False:",
        ("surgery/test_stream_hazards.py::test_a_model_that_reads_between_its_blocks_is_refused",),
    ),
    Planted(
        "A swapped model computes the scheme",
        "surgery/block_residual.py",
        "f = f / self.parts[i].beta",
        "f = f * 1.0",
        ("surgery/test_second_route.py::test_a_number_on_the_branch_goes_before_the_scheme_norms_it",),
    ),
    Planted(
        "What stays is a row",
        "surgery/norms.py",
        'staying[name] = Row(name, kind, kind, f"stays: {found}")',
        "pass",
        ("surgery/test_recognise.py::test_what_is_called_a_norm_but_stays_is_listed_with_the_reason",),
    ),
    Planted(
        "What stays is a row",
        "surgery/residuals.py",
        "for path, why in stacks.unknown.items() if plans else ():",
        "for path, why in ():",
        ("surgery/test_zoo.py::test_a_stack_that_stays_is_named",),
    ),
    Planted(
        "`undo()` gives the model back",
        "surgery/whole.py",
        "        t.copy_(value)",
        "        t.copy_(value * (1 + 2**-20))",
        ("surgery/test_blocks.py::test_every_family_trains_and_returns[Bert]",),
    ),
    Planted(
        "A model looks trained if",
        "surgery/residuals.py",
        "if trained is not None and draws_by_default:",
        "if False:",
        ("surgery/test_blocks.py::test_trained_weights_are_drawn_only_if_init_says_so",),
    ),
    Planted(
        "What other libraries keep on a model",
        "surgery/handover.py",
        'is_plain_or_dynamos = _is_plain(value) or attribute.startswith("_dynamo")',
        "is_plain_or_dynamos = True",
        ("surgery/test_handover.py::test_what_cannot_go_over_is_refused_by_name",),
    ),
    Planted(
        "What other libraries keep on a model",
        "surgery/handover.py",
        "        if hooks in old.__dict__:\n",
        "        if False:\n",
        ("surgery/test_handover.py::test_hooks_and_attributes_of_modules_go_over",),
    ),
    Planted(
        "A saved swapped model loads",
        "surgery/configuration.py",
        "if keeps_function(stock.get(KEY)):",
        "if True:",
        ("surgery/test_blocks.py::test_the_stock_class_does_not_load_a_swapped_model[Bert]",),
    ),
    Planted(
        "A saved swapped model loads",
        "surgery/marker.py",
        "for whole in () if keeps else around:",
        "for whole in ():",
        (
            "surgery/test_load_swapped.py::test_a_swap_of_a_part_or_within_a_module_is_no_stock_model"
            "[scheme-swapped_in_part]",
        ),
    ),
    Planted(
        "A saved swapped model loads",
        "surgery/marker.py",
        '_write(config, "swaps", [*(before or []), dict(how)])',
        '_write(config, "swaps", [dict(how)])',
        ("surgery/test_load_swapped.py::test_swapped_models_come_back[Bert]",),
    ),
    Planted(
        "Padding stays out of statistics",
        "surgery/padding.py",
        "hidden = torch.eq(labels, _IGNORED)\n",
        "hidden = torch.zeros_like(labels, dtype=torch.bool)\n",
        ("integrations/test_padding.py::test_a_decoders_padding_is_read_from_its_labels_or_tokens",),
    ),
    Planted(
        "Padding stays out of statistics",
        "surgery/padding.py",
        "        return mask == 0\n",
        "        return mask != mask\n",
        ("integrations/test_padding.py::test_every_kind_of_mask_counts",),
    ),
    Planted(
        "branchnorm's and prores' t follows",
        "nn/step_hooks.py",
        "t.add_(1 if skipped is None else (skipped == 0).to(t.device))",
        "t.add_(1)",
        ("nn/test_updates.py::test_a_step_that_the_scaler_skips_moves_nothing",),
    ),
    Planted(
        "branchnorm's and prores' t follows",
        "surgery/optimizers.py",
        "        if unowned:\n",
        "        if False:\n",
        ("surgery/test_optimizers.py::test_a_forgotten_optimizer_warns_once_by_name",),
    ),
    Planted(
        "Meta devices, FSDP2, copies",
        "nn/build.py",
        "                write(what, one)\n",
        "                pass\n",
        ("nn/test_life_cycles.py::test_every_order_ends_in_the_first_values[{'residual': 'rezero'}-whole]",),
    ),
    Planted(
        "Layers outside our stacks compute",
        "nn/foreign.py",
        'if placed in (None, "depth") else None',
        "if False else None",
        ("nn/test_places.py::test_layers_without_a_place_refuse_what_asks_for_one",),
    ),
    Planted(
        "Export, ONNX, torch.fx",
        "nn/tracing.py",
        "            if isinstance(x, Proxy):\n",
        "            if False:\n",
        ("export/test_export.py::test_fx_takes_layers_for_leaves",),
    ),
    Planted(
        "Export, ONNX, torch.fx",
        "nn/formulas.py",
        "a = a - shift.flatten().to(a.dtype)",
        "a = a + shift.flatten().to(a.dtype)",
        ("export/test_export.py::test_norms_decompose",),
    ),
    Planted(
        "Two norms of one's own",
        "declarations/norm.py",
        "_CLASSES.setdefault(cls.name, []).insert(0, weakref.ref(cls))",
        "_CLASSES[cls.name] = [weakref.ref(cls)]",
        ("train/test_own_norms.py::test_another_class_of_the_name_leaves_models_as_they_are",),
    ),
    Planted(
        "A damaged or forged file",
        "loop/history.py",
        'if not isinstance(event, dict) or not isinstance(event.get("event"), str):',
        "if not isinstance(event, dict):",
        ("train/test_looking.py::test_a_damaged_line_is_left_out",),
    ),
    Planted(
        "No file runs code without consent",
        "declarations/file_class.py",
        "if names_code(value) and not trust:",
        "if False:",
        ("train/test_code_in_files.py::test_configurations_as_data_run_no_code",),
    ),
    Planted(
        "A signal waits for Python code within an update",
        "loop/signals.py",
        "if importer is not None:",
        "if False:",
        ("train/test_python_inside.py::test_a_signal_within_an_import_arrives_at_its_end",),
    ),
    Planted(
        "A model keeps the class",
        "declarations/norm.py",
        "norm = (made_with and _fitting(made_with, data)) or declared(data)",
        "norm = declared(data)",
        ("train/test_own_norms.py::test_a_model_keeps_its_class_and_a_later_one_its_own",),
    ),
    Planted(
        "A swap or `undo()` happens wholly",
        "surgery/whole.py",
        "(self.finish or self.restore)()",
        "pass",
        ("surgery/test_interrupted.py::test_a_warning_that_is_an_error_leaves_the_model",),
    ),
    Planted(
        "Numbers of layers are bounded",
        "nn/place.py",
        "if not 1 <= number <= MOST_LAYERS:",
        "if not 1 <= number:",
        ("nn/test_numbers_of_layers.py::test_depths",),
    ),
    Planted(
        "Averages of a model",
        "nn/averages.py",
        "        origin.seen = _marks(mine)\n\n    def keep_step",
        "        buffer.zero_()\n\n    def keep_step",
        ("nn/test_averages.py::test_an_average_of_a_growing_scheme_has_the_models_t",),
    ),
    Planted(
        "Another attention module computes",
        "nn/layer.py",
        "masks = _torchs_masks(layer, attention, x, memory, **masks)",
        "masks = {}",
        ("nn/test_other_attention.py::test_another_attention_computes_as_in_torchs_layer",),
    ),
    Planted(
        "Swapped norms keep dtype and layout",
        "nn/result.py",
        'return weight.dtype if self.returns == "weight" else',
        'return x.dtype if self.returns == "weight" else',
        ("surgery/test_result_dtypes.py::test_a_new_norm_returns_the_dtype_that_the_old_one_did",),
    ),
]


_IN_RUST = "Rust code keeps it, and Rust tests stand beside that"
_KERNELS = "kernels in Rust keep it, which tests in Python compare with the oracle"
ELSEWHERE = {
    "Any set of options does, too": "the model is Rust's; random sets are compared with the oracle",
    "Kernels compute the formula": _KERNELS,
    "CUDA kernels do": "`cuda/test_mutants.py` plants faults into CUDA code",
    "Entries that tie for the largest": _KERNELS,
    "A tensor of a wrong shape": _IN_RUST,
    "A tensor without memory of its own": _IN_RUST,
    "Memory that cannot be had": _IN_RUST,
    "A panic in Rust": _IN_RUST,
    "No type that is not Send": _IN_RUST,
    "A recording of a CUDA graph": _IN_RUST,
    "A kill at any moment": _IN_RUST,
    "A full disk": _IN_RUST,
    "The best checkpoint is never lost": _IN_RUST,
    "A flipped bit is found": _IN_RUST,
    "One process writes": _IN_RUST,
    "Two runs in one process": _IN_RUST,
    "A rank that loses a partner": _IN_RUST,
    "On a busy machine": _IN_RUST,
    "Compiled kernels count only": _IN_RUST,
    "Each option that a resume changes": _IN_RUST,
    "A configuration that no reader takes": _IN_RUST,
    "BLEU of evaluations": _IN_RUST,
    "What Python code raises within an update": _IN_RUST,
}
"""Rows without a planted fault, by the beginning of their promise, and the reason."""
