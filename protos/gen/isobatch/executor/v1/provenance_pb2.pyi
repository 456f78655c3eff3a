from isobatch.executor.v1 import token_rows_pb2 as _token_rows_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetProvenanceRequest(_message.Message):
    __slots__ = ("sequence", "handle", "include_digests", "num_positions")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: _token_rows_pb2.SequenceKey
    handle: int
    include_digests: bool
    num_positions: int
    def __init__(self, sequence: _Optional[_Union[_token_rows_pb2.SequenceKey, _Mapping]] = ..., handle: _Optional[int] = ..., include_digests: _Optional[bool] = ..., num_positions: _Optional[int] = ...) -> None: ...

class GetProvenanceResponse(_message.Message):
    __slots__ = ("executor_epoch", "numeric_class", "kv_class", "path_sets", "steps", "blocks")
    EXECUTOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    KV_CLASS_FIELD_NUMBER: _ClassVar[int]
    PATH_SETS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    executor_epoch: int
    numeric_class: str
    kv_class: str
    path_sets: _containers.RepeatedCompositeFieldContainer[KernelPathSet]
    steps: _containers.RepeatedCompositeFieldContainer[ProvenanceStep]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockProvenance]
    def __init__(self, executor_epoch: _Optional[int] = ..., numeric_class: _Optional[str] = ..., kv_class: _Optional[str] = ..., path_sets: _Optional[_Iterable[_Union[KernelPathSet, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[ProvenanceStep, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[BlockProvenance, _Mapping]]] = ...) -> None: ...

class KernelPathSet(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedCompositeFieldContainer[_token_rows_pb2.KernelPathCount]
    def __init__(self, paths: _Optional[_Iterable[_Union[_token_rows_pb2.KernelPathCount, _Mapping]]] = ...) -> None: ...

class ProvenanceStep(_message.Message):
    __slots__ = ("scheduler_epoch", "step_id", "num_tokens", "num_wanted", "num_rows", "path_set", "sequence_hashes", "row_num_tokens")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WANTED_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    PATH_SET_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_HASHES_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    step_id: int
    num_tokens: int
    num_wanted: int
    num_rows: int
    path_set: int
    sequence_hashes: bytes
    row_num_tokens: bytes
    def __init__(self, scheduler_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_wanted: _Optional[int] = ..., num_rows: _Optional[int] = ..., path_set: _Optional[int] = ..., sequence_hashes: _Optional[bytes] = ..., row_num_tokens: _Optional[bytes] = ...) -> None: ...

class BlockProvenance(_message.Message):
    __slots__ = ("block_index", "num_positions", "writer_hash", "scheduler_epoch", "first_step_id", "last_step_id", "min_step_tokens", "max_step_tokens", "path_sets", "position_steps", "position_digests")
    BLOCK_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    WRITER_HASH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATH_SETS_FIELD_NUMBER: _ClassVar[int]
    POSITION_STEPS_FIELD_NUMBER: _ClassVar[int]
    POSITION_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    block_index: int
    num_positions: int
    writer_hash: int
    scheduler_epoch: int
    first_step_id: int
    last_step_id: int
    min_step_tokens: int
    max_step_tokens: int
    path_sets: _containers.RepeatedScalarFieldContainer[int]
    position_steps: bytes
    position_digests: bytes
    def __init__(self, block_index: _Optional[int] = ..., num_positions: _Optional[int] = ..., writer_hash: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., first_step_id: _Optional[int] = ..., last_step_id: _Optional[int] = ..., min_step_tokens: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., path_sets: _Optional[_Iterable[int]] = ..., position_steps: _Optional[bytes] = ..., position_digests: _Optional[bytes] = ...) -> None: ...
