"""What events are, by the names that libraries really give them."""

from __future__ import annotations

import pytest

from scalelab.trace.kinds import Classifier, Kind, find_collective_kind, read_step_number

COMMUNICATION = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_reduce",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)": "all_reduce",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "all_gather",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "reduce_scatter",
    "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "broadcast",
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "send_recv",
    "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs)": "all_reduce",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "other",
    "void ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)": "other",
    "mscclKernel_Sum_float_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)": "other",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)": "all_to_all",
    "void deep_ep::internode::combine<4, __nv_bfloat16>(int4*, float*)": "all_to_all",
    "void dpsk::ep::internode::notify_dispatch<false, 8>(int const*, int*)": "all_to_all",
    "void deep_ep::intranode::cached_notify_combine<2>(void**, int*, int)": "all_to_all",
    "void dpsk::ep::internode::cached_notify<false>(int, int, int)": "all_to_all",
    "void deep_ep::internode_ll::dispatch<true, 7168>(void*, float*, int*)": "all_to_all",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals)": "all_reduce",
    "void aiter::cross_device_reduce_2stage<opus::bf16_t, 8>(aiter::RankData*)": "all_reduce",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half, 8>>()": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<2>()": "all_reduce",
    "void flashinfer::moe::moereduction_allreduce_fusion_kernel_oneshot_lamport<2>()": "all_reduce",
    "void tensorrt_llm::kernels::twoShotAllReduceKernel<__half, 8>(AllReduceParams)": "all_reduce",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16>(float**)": "all_reduce",
    "void (anonymous namespace)::multimem_one_shot_reduce_kernel<float, 16>(float*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*)": "all_gather",
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int)": "barrier",
    "void nvshmemi_proxy_quiet_entrypoint()": "other",
}

COMPUTE = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t>>(T3)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int, T2)",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float>(T1)",
    "void at::native::_scatter_gather_elementwise_kernel<128, 4>(int, T3)",
    "reduce_kernel",
    "block_all_reduce_sum_kernel",
    "void warpAllReduceKernel<4>(float*)",
    "broadcast_elementwise_kernel",
    "void at::native::broadcast_kernel(int)",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_64x3_tn_align8>(T1)",
    "triton_poi_fused_all_reduce_one_shot_all_reduce_wait_tensor_3",
    "triton_red_fused__to_copy_all_gather_into_tensor_nccl_1",
    "void deep_ep::layout::get_dispatch_layout<256, 8>(long const*, int*)",
    "void dispatch_scatter_kernel<float>(float*)",
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x16_MI32x32x8x1",
]


@pytest.mark.parametrize("name", COMMUNICATION)
def test_kernels_that_move_data_between_ranks_are_communication(name: str) -> None:
    assert Classifier()("kernel", name) is Kind.COMMUNICATION
    assert find_collective_kind(name) == COMMUNICATION[name]


GENERIC = [
    "void lib::ringAllReduceKernel<4>(x)",
    "all_gather_push",
    "reduceScatterStep2",
    "my_a2a::all_to_all_v",
    "send_kernel",
]


def test_a_word_in_the_name_will_do_and_is_remembered() -> None:
    classify = Classifier(more_compute=["push$"])
    assert [name for name in GENERIC if classify("kernel", name) is not Kind.COMMUNICATION] == ["all_gather_push"]
    assert classify("kernel", "ncclKernel_AllReduce()") is Kind.COMMUNICATION
    assert classify.generic_names == set(GENERIC) - {"all_gather_push"}


@pytest.mark.parametrize("name", COMPUTE)
def test_kernels_that_only_sound_like_communication_are_compute(name: str) -> None:
    assert Classifier()("kernel", name) is Kind.COMPUTE


def test_further_patterns_are_searched_as_they_are_written() -> None:
    classify = Classifier([r"(?i)myexchange", r"(a)\1_exchange$"])
    assert classify("kernel", "void MyExchange<4>()") is Kind.COMMUNICATION
    assert classify("kernel", "aa_exchange") is Kind.COMMUNICATION
    assert classify("kernel", "ab_exchange") is Kind.COMPUTE
    assert classify("kernel", "triton_poi_fused_myexchange") is Kind.COMMUNICATION
    assert Classifier()("kernel", "void MyExchange<4>()") is Kind.COMPUTE


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("cuda_runtime", "cudaLaunchKernel", Kind.LAUNCH),
        ("cuda_runtime", "cudaLaunchKernelExC", Kind.LAUNCH),
        ("cuda_driver", "cuLaunchKernelEx", Kind.LAUNCH),
        ("cuda_runtime", "cudaGraphLaunch", Kind.LAUNCH),
        ("cuda_runtime", "cudaMemcpyAsync", Kind.LAUNCH),
        ("cuda_runtime", "cudaMemsetAsync", Kind.LAUNCH),
        ("cuda_runtime", "hipLaunchKernel", Kind.LAUNCH),
        ("cuda_runtime", "hipModuleLaunchKernel", Kind.LAUNCH),
        ("cuda_runtime", "hipExtModuleLaunchKernel", Kind.LAUNCH),
        ("cuda_runtime", "hipMemcpyWithStream", Kind.LAUNCH),
        ("cuda_runtime", "cudaDeviceSynchronize", Kind.RUNTIME),
        ("cuda_runtime", "cudaStreamWaitEvent", Kind.RUNTIME),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", Kind.COPY),
        ("gpu_memset", "Memset (Device)", Kind.COPY),
        ("user_annotation", "nccl:all_reduce", Kind.REQUEST),
        ("gpu_user_annotation", "nccl:all_reduce", Kind.OTHER),
        ("user_annotation", "gloo:all_reduce", Kind.COMMUNICATION),
        ("cpu_op", "MPI_Allreduce", Kind.COMMUNICATION),
        ("user_annotation", "ProfilerStep#12", Kind.STEP),
        ("gpu_user_annotation", "ProfilerStep#12", Kind.DEVICE_STEP),
        ("cpu_op", "aten::mm", Kind.OPERATOR),
        ("cpu_op", "mine::fused", Kind.OPERATOR),
        ("cpu_op", "mpi::fused", Kind.OPERATOR),
        ("cpu_op", "torch::distributed::reducer::mul_out", Kind.OPERATOR),
        ("cpu_op", "## Call CompiledFxGraph fhrwlfv3ifor3bd557aj ##", Kind.OPERATOR),
        ("cpu_op", "CompiledFunctionBackward", Kind.ENCLOSING),
        ("cpu_op", "Torch-Compiled Region: 0/0", Kind.ENCLOSING),
        ("cpu_op", "AddmmBackward0", Kind.ENCLOSING),
        ("cpu_op", "autograd::engine::evaluate_function: CompiledFunctionBackward", Kind.ENCLOSING),
        ("cpu_op", "RegisterPostBackwardFunctionBackward", Kind.ENCLOSING),
        ("cpu_op", "c10d::allreduce_", Kind.ENCLOSING),
        ("cpu_op", "record_param_comms", Kind.ENCLOSING),
        ("cpu_op", "torch::autograd::AccumulateGrad", Kind.ENCLOSING),
        ("python_function", "train.py(3): step", Kind.SOURCE),
        ("python_function", "torch/nn/modules/module.py(1773): _call_impl", Kind.OTHER),
        ("python_function", "nn.Module: Linear_3", Kind.MODULE),
        ("python_function", "<built-in function linear>", Kind.OTHER),
        ("user_annotation", "my range", Kind.ANNOTATION),
        ("mtia_ccp_events", "fc-dtype_Float", Kind.COMPUTE),
        ("mtia_ccp_events", "dma_request", Kind.COPY),
        ("mtia_ccp_events", "event_wait", Kind.OTHER),
        ("mtia_runtime", "runFunction - job_prep_and_submit_for_execution", Kind.LAUNCH),
        ("xpu_driver", "zeCommandQueueSynchronize", Kind.RUNTIME),
    ],
)
def test_everything_else_goes_by_category_and_name(category: str, name: str, kind: Kind) -> None:
    assert Classifier()(category, name) is kind


def test_the_number_of_a_step_is_read_off_its_name() -> None:
    assert read_step_number("ProfilerStep#12") == 12
    assert read_step_number("ProfilerStep*") == -1
