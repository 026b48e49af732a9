"""Names of cumm's code generator that programs import; nothing is generated here."""
