from isobatch.executor.v1 import token_rows_pb2 as _token_rows_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_OUTCOME_UNSPECIFIED: _ClassVar[DraftOutcome]
    DRAFT_OUTCOME_COMPUTED: _ClassVar[DraftOutcome]
    DRAFT_OUTCOME_BEHIND: _ClassVar[DraftOutcome]
    DRAFT_OUTCOME_NO_CAPACITY: _ClassVar[DraftOutcome]
    DRAFT_OUTCOME_FAILED: _ClassVar[DraftOutcome]
DRAFT_OUTCOME_UNSPECIFIED: DraftOutcome
DRAFT_OUTCOME_COMPUTED: DraftOutcome
DRAFT_OUTCOME_BEHIND: DraftOutcome
DRAFT_OUTCOME_NO_CAPACITY: DraftOutcome
DRAFT_OUTCOME_FAILED: DraftOutcome

class DraftTokens(_message.Message):
    __slots__ = ("row_sequence_ids", "row_generations", "row_start_positions", "row_num_tokens", "row_max_drafts", "row_min_confidences", "token_ids")
    ROW_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ROW_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_START_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ROW_MIN_CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    row_sequence_ids: bytes
    row_generations: bytes
    row_start_positions: bytes
    row_num_tokens: bytes
    row_max_drafts: bytes
    row_min_confidences: bytes
    token_ids: bytes
    def __init__(self, row_sequence_ids: _Optional[bytes] = ..., row_generations: _Optional[bytes] = ..., row_start_positions: _Optional[bytes] = ..., row_num_tokens: _Optional[bytes] = ..., row_max_drafts: _Optional[bytes] = ..., row_min_confidences: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class TokensDrafted(_message.Message):
    __slots__ = ("row_outcomes", "row_num_computed", "row_num_drafts", "token_ids", "confidences", "timings")
    ROW_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ROW_NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    row_outcomes: bytes
    row_num_computed: bytes
    row_num_drafts: bytes
    token_ids: bytes
    confidences: bytes
    timings: _token_rows_pb2.StepTimings
    def __init__(self, row_outcomes: _Optional[bytes] = ..., row_num_computed: _Optional[bytes] = ..., row_num_drafts: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., confidences: _Optional[bytes] = ..., timings: _Optional[_Union[_token_rows_pb2.StepTimings, _Mapping]] = ...) -> None: ...
