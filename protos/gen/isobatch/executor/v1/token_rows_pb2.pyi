from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_SOURCE_UNSPECIFIED: _ClassVar[TokenSource]
    TOKEN_SOURCE_LITERAL: _ClassVar[TokenSource]
    TOKEN_SOURCE_STEP_OUTPUT: _ClassVar[TokenSource]

class Statistic(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATISTIC_UNSPECIFIED: _ClassVar[Statistic]
    STATISTIC_ARGMAX: _ClassVar[Statistic]
    STATISTIC_TOP_K: _ClassVar[Statistic]
    STATISTIC_NORMALIZER: _ClassVar[Statistic]
    STATISTIC_QUANTILE: _ClassVar[Statistic]
    STATISTIC_NAMED: _ClassVar[Statistic]
    STATISTIC_FULL_ROW: _ClassVar[Statistic]
    STATISTIC_DIGEST: _ClassVar[Statistic]

class StepOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_OUTCOME_UNSPECIFIED: _ClassVar[StepOutcome]
    STEP_OUTCOME_COMPUTED: _ClassVar[StepOutcome]
    STEP_OUTCOME_NO_CAPACITY: _ClassVar[StepOutcome]
    STEP_OUTCOME_SOURCE_NOT_COMPUTED: _ClassVar[StepOutcome]

class RowOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_OUTCOME_UNSPECIFIED: _ClassVar[RowOutcome]
    ROW_OUTCOME_COMPUTED: _ClassVar[RowOutcome]
    ROW_OUTCOME_NON_FINITE: _ClassVar[RowOutcome]

class KernelOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KERNEL_OP_UNSPECIFIED: _ClassVar[KernelOp]
    KERNEL_OP_EMBED: _ClassVar[KernelOp]
    KERNEL_OP_NORM_QUANTIZE: _ClassVar[KernelOp]
    KERNEL_OP_LINEAR: _ClassVar[KernelOp]
    KERNEL_OP_ROPE_WRITE_KV: _ClassVar[KernelOp]
    KERNEL_OP_PAGED_ATTENTION: _ClassVar[KernelOp]
    KERNEL_OP_GATE_QUANTIZE: _ClassVar[KernelOp]
    KERNEL_OP_ROW_STATISTICS: _ClassVar[KernelOp]
    KERNEL_OP_QUANTIZE: _ClassVar[KernelOp]

class KernelPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KERNEL_PATH_UNSPECIFIED: _ClassVar[KernelPath]
    KERNEL_PATH_GEMV: _ClassVar[KernelPath]
    KERNEL_PATH_GEMV_MULTI: _ClassVar[KernelPath]
    KERNEL_PATH_GEMM: _ClassVar[KernelPath]
    KERNEL_PATH_ATTENTION_DECODE: _ClassVar[KernelPath]
    KERNEL_PATH_ATTENTION_PREFILL: _ClassVar[KernelPath]
    KERNEL_PATH_OTHER: _ClassVar[KernelPath]

class KernelUnit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KERNEL_UNIT_UNSPECIFIED: _ClassVar[KernelUnit]
    KERNEL_UNIT_SCALAR: _ClassVar[KernelUnit]
    KERNEL_UNIT_AVX2: _ClassVar[KernelUnit]
    KERNEL_UNIT_VNNI: _ClassVar[KernelUnit]
    KERNEL_UNIT_AMX: _ClassVar[KernelUnit]
    KERNEL_UNIT_NEON: _ClassVar[KernelUnit]
    KERNEL_UNIT_METAL: _ClassVar[KernelUnit]
    KERNEL_UNIT_CUDA: _ClassVar[KernelUnit]
    KERNEL_UNIT_MLX: _ClassVar[KernelUnit]
TOKEN_SOURCE_UNSPECIFIED: TokenSource
TOKEN_SOURCE_LITERAL: TokenSource
TOKEN_SOURCE_STEP_OUTPUT: TokenSource
STATISTIC_UNSPECIFIED: Statistic
STATISTIC_ARGMAX: Statistic
STATISTIC_TOP_K: Statistic
STATISTIC_NORMALIZER: Statistic
STATISTIC_QUANTILE: Statistic
STATISTIC_NAMED: Statistic
STATISTIC_FULL_ROW: Statistic
STATISTIC_DIGEST: Statistic
STEP_OUTCOME_UNSPECIFIED: StepOutcome
STEP_OUTCOME_COMPUTED: StepOutcome
STEP_OUTCOME_NO_CAPACITY: StepOutcome
STEP_OUTCOME_SOURCE_NOT_COMPUTED: StepOutcome
ROW_OUTCOME_UNSPECIFIED: RowOutcome
ROW_OUTCOME_COMPUTED: RowOutcome
ROW_OUTCOME_NON_FINITE: RowOutcome
KERNEL_OP_UNSPECIFIED: KernelOp
KERNEL_OP_EMBED: KernelOp
KERNEL_OP_NORM_QUANTIZE: KernelOp
KERNEL_OP_LINEAR: KernelOp
KERNEL_OP_ROPE_WRITE_KV: KernelOp
KERNEL_OP_PAGED_ATTENTION: KernelOp
KERNEL_OP_GATE_QUANTIZE: KernelOp
KERNEL_OP_ROW_STATISTICS: KernelOp
KERNEL_OP_QUANTIZE: KernelOp
KERNEL_PATH_UNSPECIFIED: KernelPath
KERNEL_PATH_GEMV: KernelPath
KERNEL_PATH_GEMV_MULTI: KernelPath
KERNEL_PATH_GEMM: KernelPath
KERNEL_PATH_ATTENTION_DECODE: KernelPath
KERNEL_PATH_ATTENTION_PREFILL: KernelPath
KERNEL_PATH_OTHER: KernelPath
KERNEL_UNIT_UNSPECIFIED: KernelUnit
KERNEL_UNIT_SCALAR: KernelUnit
KERNEL_UNIT_AVX2: KernelUnit
KERNEL_UNIT_VNNI: KernelUnit
KERNEL_UNIT_AMX: KernelUnit
KERNEL_UNIT_NEON: KernelUnit
KERNEL_UNIT_METAL: KernelUnit
KERNEL_UNIT_CUDA: KernelUnit
KERNEL_UNIT_MLX: KernelUnit

class SequenceKey(_message.Message):
    __slots__ = ("sequence_id", "generation")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    generation: int
    def __init__(self, sequence_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class OpenSequences(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[OpenSequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[OpenSequence, _Mapping]]] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("key", "model_id", "cache_salt", "token_ids", "max_cached_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: SequenceKey
    model_id: str
    cache_salt: str
    token_ids: bytes
    max_cached_tokens: int
    def __init__(self, key: _Optional[_Union[SequenceKey, _Mapping]] = ..., model_id: _Optional[str] = ..., cache_salt: _Optional[str] = ..., token_ids: _Optional[bytes] = ..., max_cached_tokens: _Optional[int] = ...) -> None: ...

class SequencesOpened(_message.Message):
    __slots__ = ("sequences", "kv_occupancy")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceOpened]
    kv_occupancy: KvOccupancy
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceOpened, _Mapping]]] = ..., kv_occupancy: _Optional[_Union[KvOccupancy, _Mapping]] = ...) -> None: ...

class SequenceOpened(_message.Message):
    __slots__ = ("key", "num_cached_tokens", "provenance_handle")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    key: SequenceKey
    num_cached_tokens: int
    provenance_handle: int
    def __init__(self, key: _Optional[_Union[SequenceKey, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., provenance_handle: _Optional[int] = ...) -> None: ...

class ReleaseSequences(_message.Message):
    __slots__ = ("sequence_ids",)
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    def __init__(self, sequence_ids: _Optional[bytes] = ...) -> None: ...

class SequencesReleased(_message.Message):
    __slots__ = ("kv_occupancy",)
    KV_OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    kv_occupancy: KvOccupancy
    def __init__(self, kv_occupancy: _Optional[_Union[KvOccupancy, _Mapping]] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("step_id", "model_id", "released_sequence_ids", "row_sequence_ids", "row_generations", "row_start_positions", "row_num_tokens", "row_token_sources", "row_source_steps", "row_source_wanted", "token_ids", "wanted_token_indexes", "wanted_statistics", "wanted_top_k", "wanted_inverse_temperatures", "wanted_quantiles", "named_starts", "named_ids", "edit_starts", "edit_ids", "edit_values", "record_provenance")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_TOKEN_SOURCES_FIELD_NUMBER: _ClassVar[int]
    ROW_SOURCE_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROW_SOURCE_WANTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WANTED_TOKEN_INDEXES_FIELD_NUMBER: _ClassVar[int]
    WANTED_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    WANTED_TOP_K_FIELD_NUMBER: _ClassVar[int]
    WANTED_INVERSE_TEMPERATURES_FIELD_NUMBER: _ClassVar[int]
    WANTED_QUANTILES_FIELD_NUMBER: _ClassVar[int]
    NAMED_STARTS_FIELD_NUMBER: _ClassVar[int]
    NAMED_IDS_FIELD_NUMBER: _ClassVar[int]
    EDIT_STARTS_FIELD_NUMBER: _ClassVar[int]
    EDIT_IDS_FIELD_NUMBER: _ClassVar[int]
    EDIT_VALUES_FIELD_NUMBER: _ClassVar[int]
    RECORD_PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    model_id: str
    released_sequence_ids: bytes
    row_sequence_ids: bytes
    row_generations: bytes
    row_start_positions: bytes
    row_num_tokens: bytes
    row_token_sources: bytes
    row_source_steps: bytes
    row_source_wanted: bytes
    token_ids: bytes
    wanted_token_indexes: bytes
    wanted_statistics: bytes
    wanted_top_k: bytes
    wanted_inverse_temperatures: bytes
    wanted_quantiles: bytes
    named_starts: bytes
    named_ids: bytes
    edit_starts: bytes
    edit_ids: bytes
    edit_values: bytes
    record_provenance: bool
    def __init__(self, step_id: _Optional[int] = ..., model_id: _Optional[str] = ..., released_sequence_ids: _Optional[bytes] = ..., row_sequence_ids: _Optional[bytes] = ..., row_generations: _Optional[bytes] = ..., row_start_positions: _Optional[bytes] = ..., row_num_tokens: _Optional[bytes] = ..., row_token_sources: _Optional[bytes] = ..., row_source_steps: _Optional[bytes] = ..., row_source_wanted: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., wanted_token_indexes: _Optional[bytes] = ..., wanted_statistics: _Optional[bytes] = ..., wanted_top_k: _Optional[bytes] = ..., wanted_inverse_temperatures: _Optional[bytes] = ..., wanted_quantiles: _Optional[bytes] = ..., named_starts: _Optional[bytes] = ..., named_ids: _Optional[bytes] = ..., edit_starts: _Optional[bytes] = ..., edit_ids: _Optional[bytes] = ..., edit_values: _Optional[bytes] = ..., record_provenance: _Optional[bool] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("step_id", "executor_epoch", "outcome", "row_outcomes", "argmax_ids", "max_logits", "quantile_ids", "normalizers", "top_k_starts", "top_k_ids", "top_k_logits", "top_k_weights", "named_logits", "digests", "timings", "kernel_paths", "kv_occupancy", "provenance_handle", "non_finite_details")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ROW_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ARGMAX_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGITS_FIELD_NUMBER: _ClassVar[int]
    QUANTILE_IDS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_STARTS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_LOGITS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NAMED_LOGITS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_PATHS_FIELD_NUMBER: _ClassVar[int]
    KV_OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    NON_FINITE_DETAILS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    executor_epoch: int
    outcome: StepOutcome
    row_outcomes: bytes
    argmax_ids: bytes
    max_logits: bytes
    quantile_ids: bytes
    normalizers: bytes
    top_k_starts: bytes
    top_k_ids: bytes
    top_k_logits: bytes
    top_k_weights: bytes
    named_logits: bytes
    digests: bytes
    timings: StepTimings
    kernel_paths: _containers.RepeatedCompositeFieldContainer[KernelPathCount]
    kv_occupancy: KvOccupancy
    provenance_handle: int
    non_finite_details: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step_id: _Optional[int] = ..., executor_epoch: _Optional[int] = ..., outcome: _Optional[_Union[StepOutcome, str]] = ..., row_outcomes: _Optional[bytes] = ..., argmax_ids: _Optional[bytes] = ..., max_logits: _Optional[bytes] = ..., quantile_ids: _Optional[bytes] = ..., normalizers: _Optional[bytes] = ..., top_k_starts: _Optional[bytes] = ..., top_k_ids: _Optional[bytes] = ..., top_k_logits: _Optional[bytes] = ..., top_k_weights: _Optional[bytes] = ..., named_logits: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., kernel_paths: _Optional[_Iterable[_Union[KernelPathCount, _Mapping]]] = ..., kv_occupancy: _Optional[_Union[KvOccupancy, _Mapping]] = ..., provenance_handle: _Optional[int] = ..., non_finite_details: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchLogits(_message.Message):
    __slots__ = ("step_id", "wanted_indexes")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    WANTED_INDEXES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    wanted_indexes: bytes
    def __init__(self, step_id: _Optional[int] = ..., wanted_indexes: _Optional[bytes] = ...) -> None: ...

class LogitsFetched(_message.Message):
    __slots__ = ("step_id", "logits")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    logits: TensorPayload
    def __init__(self, step_id: _Optional[int] = ..., logits: _Optional[_Union[TensorPayload, _Mapping]] = ...) -> None: ...

class TensorPayload(_message.Message):
    __slots__ = ("inline", "shared_memory")
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    inline: bytes
    shared_memory: SharedMemorySlice
    def __init__(self, inline: _Optional[bytes] = ..., shared_memory: _Optional[_Union[SharedMemorySlice, _Mapping]] = ...) -> None: ...

class SharedMemorySlice(_message.Message):
    __slots__ = ("name", "offset", "num_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    num_bytes: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue_ns", "prepare_ns", "forward_ns", "statistics_ns", "total_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    prepare_ns: int
    forward_ns: int
    statistics_ns: int
    total_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., prepare_ns: _Optional[int] = ..., forward_ns: _Optional[int] = ..., statistics_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class KernelPathCount(_message.Message):
    __slots__ = ("op", "path", "unit", "dispatches", "rows")
    OP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    DISPATCHES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    op: KernelOp
    path: KernelPath
    unit: KernelUnit
    dispatches: int
    rows: int
    def __init__(self, op: _Optional[_Union[KernelOp, str]] = ..., path: _Optional[_Union[KernelPath, str]] = ..., unit: _Optional[_Union[KernelUnit, str]] = ..., dispatches: _Optional[int] = ..., rows: _Optional[int] = ...) -> None: ...

class KvOccupancy(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "evictable_blocks", "shared_blocks")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    evictable_blocks: int
    shared_blocks: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., evictable_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ...) -> None: ...
