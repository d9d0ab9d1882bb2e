"""Which tests `make test` leaves to `make test-all`, and which that leaves to `make test-long`.

`make test` is sharp: it covers every area, every norm × scheme, every command and every public name, in minutes. A test
named here has many cases that look alike, or is long. `KEPT` says how many of its cases stay in `make test`: each
so-many-th, from the first on; none where it says `NONE`. The others are marked `full`. `KEPT_IN_ALL` says the same of
these and `make test-all`, and each third stays where it says nothing; what is left is marked `long`.
"""

NONE = 10**9
KEPT = {
    # CUDA on the emulated device: each case compiles a kernel or several
    "test_a_step_that_cannot_be_recorded_is_done": 3,
    "test_a_mutant_is_found": NONE,
    "test_the_address_sanitizer_finds_nothing": NONE,
    "test_a_norm": 12,
    "test_properties": 3,
    "test_lengths_of_another_order": 5,
    "test_a_column_norm": 4,
    "test_columns": 3,
    "test_the_residual_step": 3,
    "test_parameters_of_16_bits": 3,
    "test_cross_entropy": 3,
    "test_binaries": 18,
    # operators, norms and layers
    "test_no_shape_of_rows_compiles_anew": 2,
    "test_another_attention_computes_as_in_torchs_layer": 4,
    "test_a_wrapper_of_our_attention_computes_the_scheme_or_is_refused": 4,
    "test_an_average_of_a_growing_scheme_has_the_models_t": 3,
    "test_an_average_of_running_norms_has_statistics": 2,
    "test_results_are_contiguous": 5,
    "test_a_scheme_runs_without_numbers": 5,
    "test_a_scheme_runs_in_16_bits": 6,
    "test_a_norm_runs_in_16_bits": 3,
    "test_post_init_leaves_initial_values_of_schemes": 6,
    "test_rates_of_a_swapped_model_are_those_of_a_stack": 4,
    "test_initial_standard_deviations": 3,
    "test_the_skeleton_is_the_rust_model": 8,
    "test_compile_export_and_vmap": 10,
    "test_every_parameter_has_a_gradient_and_padding_none": 32,
    "test_every_family_under_every_scheme": 8,
    "test_compile_with_inductor_and_dynamic_shapes": NONE,
    "test_fuzz": 2,
    # cases that look alike, or that start several processes
    "test_logits_and_every_gradient_equal_the_oracles": 4,
    "test_slurm_kubernetes_and_a_closed_terminal_are_ctrl_c": 3,
    "test_every_order_ends_in_the_first_values": 5,
    "test_ten_losses_and_all_weights_are_the_tables": 6,
    "test_layers_take_their_places": 5,
    "test_a_stack_whose_layers_were_changed": 5,
    "test_a_hundred_signals_into_a_run_of_ones_own": NONE,
    "test_swapped_models_come_back": 4,
    "test_fsdp2_from_the_meta_device": NONE,
    "test_the_same_stack": 4,
    "test_compiled_blocks_add_their_input": 3,
    "test_options": 3,
    "test_options_and_left_padding": 4,
    "test_steps_of_decoding_are_the_whole": 4,
    "test_every_preset_takes_every_scheme": 4,
    "test_error_is_at_most_twice_pytorchs": 4,
    "test_first_values": 3,
    "test_reset_parameters_gives_first_values_back": 4,
    "test_a_closed_output_is_said_before_the_work": 5,
    "test_saved_and_loaded_by_hugging_face": 4,
    "test_checkpoints_repeat_their_masks": 6,
    "test_a_new_norm_returns_the_dtype_that_the_old_one_did": 5,
    "test_an_exported_norm_keeps_the_dtype": 5,
    "test_every_scheme_scales_its_branches": 5,
    "test_hidden_states_are_x": 4,
    "test_cached_generation_equals_uncached": 4,
    "test_greedy_tokens_are_the_same": 4,
    "test_first_values_are_the_base_models": 4,
    "test_grad_jvp_and_functional_call": 4,
    "test_tensorized_attention": 4,
    "test_kernels_with_little_memory_left": NONE,
    "test_a_saved_program_runs_without_the_package": NONE,
    "test_layernorm_and_postnorm_are_fairseqs_transformer": NONE,
    "test_a_resumed_run_with_other_options_is_averaged": NONE,
    "test_schemes_with_more_options": NONE,
    # surgery
    "test_a_few_schemes": 16,
    "test_swapped_models_train_copy_and_load": 20,
    "test_norms_swap_train_and_return": 4,
    "test_residuals_swap_train_and_return": 12,
    "test_its_own_scheme_changes_nothing": 4,
    "test_every_family_trains_and_returns": 6,
    "test_dropout_falls_on_each_sublayer_once": 5,
    "test_generation": 5,
    "test_checkpointing_gives_the_same_gradients": 6,
    "test_what_the_library_records": 5,
    "test_copies_and_pickles_stand_alone": 3,
    "test_every_norm_of_a_family_swaps_trains_and_returns": 6,
    "test_the_same_norm_keeps_a_familys_outputs": 6,
    # training
    "test_many_layers_are_told_from_few": 4,
    "test_what_a_callback_raises_leaves_fit_as_it_is_after_saving": 6,
    "test_a_rank_that_loses_its_partner_says_so_in_one_line": 2,
    "test_a_launcher_repeats_the_terminals_signal": 9,
    "test_ranks_train_one_model_after_another": 2,
    "test_it_changes_no_bit": 6,
    "test_ten_losses_of_a_language_model": 3,
    "test_ddp": 2,
    "test_decoder_only": 8,
    "test_an_update_is_torchs": 3,
    "test_signals_are_heard_between_batches": 2,
    "test_the_ranks_batches_are_one_batch": 4,
    "test_a_run_goes_on_from_the_newest_whole_checkpoint": 3,
    "test_statistics_of_ranks_with_little_memory_left": NONE,
    "test_a_killed_run_resumes_to_the_same_bits": NONE,
    "test_ten_losses_equal_the_oracles": 24,
    "test_activation_checkpointing_changes_no_bit": 16,
    "test_a_resumed_run_is_the_uninterrupted_one": 9,
    "test_real_text_trains_and_translates": NONE,
    "test_the_same_seed_gives_the_same_bits": 2,
    "test_ctrl_c_within_an_evaluation": 2,
    "test_ranks_are_accumulation": NONE,
    "test_a_checkpoint_does_not_depend_on_the_ranks": NONE,
    "test_ctrl_c_saves_once_for_all": NONE,
    "test_what_one_rank_says_stops_all": NONE,
    "test_files_that_may_not_grow": NONE,
    "test_a_full_disk": NONE,
    "test_every_reproduction": NONE,
    "test_every_rows_options_are_taken": 40,
    "test_another_model_is_refused": 6,
    "test_a_changed_option_has_its_effect": 3,
    "test_from_a_taken_option_on_losses_are_the_oracles": 4,
    "test_an_exception_of_a_norm_is_the_object_itself_and_the_run_is_saved": 5,
    "test_a_signal_waits_until_a_norm_returns": 4,
    # fairseq
    "test_bad_flags_are_one_line": 3,
    "test_translates_multi30k_as_fairseq_does": NONE,
    "test_converts_both_ways": 3,
    "test_trains_resumes_validates_and_generates": 20,
    "test_statistics_come_from_real_tokens_and_stay": 4,
    "test_language_model": NONE,
    "test_two_processes": NONE,
    "test_commands_after_training": NONE,
    "test_the_wrapper_runs_fairseqs_commands": 2,
    "test_checkpoints_of_other_models_are_one_line": NONE,
    "test_tables_of_another_core_are_refused": 3,
    "test_hydra": NONE,
    "test_spawned_workers_are_patched": NONE,
    "test_the_command_of_transformers_without_tears": NONE,
    "test_trains_with_fairseqs_flags": 6,
    # export
    "test_every_scheme_exports": 4,
    "test_norms_decompose": 2,
    "test_onnx": 4,
    "test_onnxruntime_loads_every_opset": 10,
    "test_averages_of_checkpoints": 3,
    "test_rows_on_two_ranks": NONE,
    "test_the_rules_cost_nothing_until_dtensor_comes": NONE,
    # what works on the whole project
    "test_the_core_comes_with_torch": 3,
    "test_what_the_guide_makes": NONE,
    "test_the_notebook": NONE,
    "test_benchmarks_that_nothing_else_runs": NONE,
    "test_the_gpu_benchmark": NONE,
    "test_a_call_of_the_gpu_benchmark_adds_to_an_earlier_one": NONE,
    "test_what_ends_the_command_ends_its_section": NONE,
}


KEPT_IN_ALL = {
    "test_every_reproduction": NONE,
    "test_interrupts_at_many_lines": 30,
    "test_no_reader_of_a_run_runs_code_of_any_field": 20,
    "test_a_signal_amid_a_commands_imports_ends_it": 5,
    "test_results_are_contiguous": 2,
    "test_a_scheme_runs_without_numbers": 2,
    "test_a_scheme_runs_in_16_bits": 2,
    "test_a_signal_waits_until_a_norm_returns": 2,
    "test_an_exception_of_a_norm_is_the_object_itself_and_the_run_is_saved": 2,
    "test_a_mutant_is_found": 4,
    "test_the_address_sanitizer_finds_nothing": 2,
    "test_every_scheme_is_taken": 4,
    "test_swapped_models_train_copy_and_load": 3,
    "test_a_few_schemes": 2,
    "test_masks_and_any_batch_and_length": 4,
    "test_every_scheme_in_f32": 6,
    "test_trains_resumes_validates_and_generates": 4,
    "test_translates_multi30k_as_fairseq_does": 2,
    "test_ten_losses_equal_the_oracles": 3,
    "test_activation_checkpointing_changes_no_bit": 3,
    "test_residuals_swap_train_and_return": 3,
    "test_compile_export_and_vmap": 2,
    "test_onnxruntime_loads_every_opset": 2,
}


def sort(items) -> None:
    """Marks the cases that are left to `make test-all` and to `make test-long`."""
    _leave(items, KEPT, "full")
    left = {name: 1 if kept == NONE else 3 for name, kept in KEPT.items()} | KEPT_IN_ALL
    _leave([item for item in items if item.get_closest_marker("full")], left, "long")


def _leave(items, kept: dict[str, int], marker: str) -> None:
    seen: dict[tuple[str, str], int] = {}
    for item in items:
        name = getattr(item, "originalname", None) or item.name
        if name in kept:
            place = (str(item.path), name)
            seen[place] = seen.get(place, -1) + 1
            if seen[place] % kept[name] or kept[name] == NONE:
                item.add_marker(marker)
