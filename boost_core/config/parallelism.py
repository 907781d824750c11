"""How a gang is split."""

from pydantic import Field

from boost_core.config.base import Config


class ParallelismConfig(Config):
    """How the gang is split. The world size is the product; tensor parallel ranks are innermost."""

    tensor_parallel_size: int = Field(1, ge=1, le=1024)
    pipeline_parallel_size: int = Field(1, ge=1, le=1024)
    data_parallel_size: int = Field(1, ge=1, le=65_536)

    @property
    def world_size(self) -> int:
        """Number of workers in the gang."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size
