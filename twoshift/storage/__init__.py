"""Folders of safetensors and JSON: saved in one step, checksummed, refused when damaged.

`save_folder` writes a *card* (a readable ``card.json``) and files of tensors beside it;
`read_folder` reads them back. Pickle is never used.
"""

from twoshift.storage._cards import CARD as CARD
from twoshift.storage._cards import card_of as card_of
from twoshift.storage._cards import misfits as misfits
from twoshift.storage._files import atomic_file as atomic_file
from twoshift.storage._files import atomic_folder as atomic_folder
from twoshift.storage._files import sha256 as sha256
from twoshift.storage._files import storage_errors as storage_errors
from twoshift.storage._files import write_json as write_json
from twoshift.storage._folders import Saved as Saved
from twoshift.storage._folders import is_saved as is_saved
from twoshift.storage._folders import read_card as read_card
from twoshift.storage._folders import read_folder as read_folder
from twoshift.storage._folders import save_folder as save_folder
from twoshift.storage._folders import saved_files as saved_files
from twoshift.storage._folders import saved_folder as saved_folder
from twoshift.storage._locks import only_one as only_one
from twoshift.storage._tensors import build_to_fit as build_to_fit
from twoshift.storage._tensors import fingerprint as fingerprint
from twoshift.storage._tensors import join_tensors as join_tensors
from twoshift.storage._tensors import read_tensors as read_tensors
from twoshift.storage._tensors import split_tensors as split_tensors
from twoshift.storage._tensors import write_tensors as write_tensors
