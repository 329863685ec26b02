# Like CANN's, it reads a variable that is not set, and ends with a command that fails.
export ASCEND_HOME_PATH=/usr/local/Ascend/ascend-toolkit/latest
export PATH=$ASCEND_HOME_PATH/bin:$PATH
[ -n "$ZSH_VERSION" ] && emulate -L sh
