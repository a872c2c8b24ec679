"""What runs between the parent and the isolated program: as few imports as it can do with.

Started as `python -I -S`, once for each program, so that every module counts: no `re`, no
`dataclasses`, no `json`. Modules import each other relatively, because the launcher knows this
package as `inside`.
"""
