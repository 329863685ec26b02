"""How every part of Spillway reads its settings: typed structs whose refusals name the setting, and sizes."""
