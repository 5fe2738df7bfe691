"""Chat conversations, chat templates, and the tokens into which a ChatFormat converts conversations."""

from tests.support import data_sources
from titanplans.training.data.chat.chat import ChatFormat
from titanplans.training.data.chat.messages import read_conversation
from titanplans.training.data.vocabulary import default_tokenizer_path

TURN = "{{ eos_token + '\n' }}"

PLAIN = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ '[' + m.role + ']\n' }}"
    "{% if m.role == 'assistant' %}<>{{ m.content + eos_token }}</>{% else %}{{ m.content }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)

MARKED = PLAIN.replace("<>", "{% generation %}").replace("</>", "{% endgeneration %}")

PLAIN = PLAIN.replace("<>", "").replace("</>", "")


def message(role, content):
    return {"role": role, "content": content}


TALK = [
    message("system", "Be brief."),
    message("user", "Name a prime, é!"),
    message("assistant", "2, naïve 日本語 🙂"),
    message("user", " Another? "),
    message("assistant", "3"),
]


def form(options, seq_len=512):
    return ChatFormat(options, default_tokenizer_path(), seq_len)


def tokens_of(row, options):
    return form(options).tokens(read_conversation(row, options, "here"), "here")


def decoded(ids):
    return data_sources.tokenizer().decode(list(map(int, ids)), skip_special_tokens=False)


def numbered(n):
    return [[message("user", f"q{i}?"), message("assistant", f"answer {i}")] for i in range(n)]
