"""torchtitan's tokenizer as jobs use it: for texts. Conversations are tokenised in `chat/template.py`, by transformers."""

from dataclasses import dataclass

from torchtitan.components.tokenizer import HuggingFaceTokenizer


class TextTokenizer(HuggingFaceTokenizer):
    """torchtitan's tokenizer, without the folder's chat template."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        """As torchtitan's."""

    def set_chat_template(self, template: str) -> None:
        """Leave the folder's template alone: torchtitan's Jinja refuses {% generation %}, which transformers knows."""
